// The log of actions while other threads read it, and questions among hubs. Arguments: seed, rounds.
#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "causes.hpp"
#include "check.hpp"
#include "control/action_log.hpp"
#include "control/hub.hpp"
#include "sockets.hpp"

namespace pypipe::test {
namespace {

// One thread writes actions 0, 1, 2, ...; readers always see a contiguous range of whole actions.
void readers(std::uint64_t count) {
  ActionLog log(3, 8, "");
  std::atomic<bool> done{false};
  std::vector<std::thread> threads;
  threads.emplace_back([&] {
    while (!done) {
      const std::vector<ActionEntry> kept = log.actions();
      check(kept.size() <= 8, "more actions than fit");
      for (std::size_t i = 0; i < kept.size(); ++i) {
        check_equal(kept[i].microbatch, kept[0].microbatch + i, "actions that do not follow each other");
        check_equal(kept[i].stage, kept[i].microbatch % 7, "a torn action");
        check_equal(kept[i].kind, kept[i].microbatch % 5, "a torn action");
        check(i + 1 == kept.size() || kept[i].end != 0, "an action that began before the one before it had ended");
        check(kept[i].end == 0 || kept[i].end >= kept[i].start, "an action that ended before it began");
      }
    }
  });
  threads.emplace_back([&] {
    while (!done) {
      const RankStatus status = log.status();
      check_equal(status.rank, 3U, "the rank");
      if (status.running != 0 && status.completed != 0) {
        check_equal(status.now.microbatch, status.last.microbatch + 1, "what it does and what it did");
      }
      if (status.busy != 0) check(std::string(status.work.data()).starts_with("work "), "what it is busy with");
    }
  });
  threads.emplace_back([&] {
    for (int i = 0; !done; ++i) log.set_busy(i % 3 == 0 ? "" : "work " + std::to_string(i));
  });
  log.step();
  for (std::uint64_t n = 0; n < count; ++n) {
    const auto i = static_cast<std::uint32_t>(n);
    log.begin(i % 7, i % 5, i);
    if (n % 2 == 0) log.ready();
  }
  log.end();
  done = true;
  for (std::thread& thread : threads) thread.join();
  check_equal(log.actions().back().microbatch, count - 1, "the last action");
}

void traces_and_files() {
  const std::string path = std::filesystem::temp_directory_path() / ("action_log_stress-" + std::to_string(::getpid()));
  {
    ActionLog log(1, 4, path);
    log.start_trace(6);
    for (std::uint32_t i = 0; i < 10; ++i) log.begin(0, 0, i);
    log.end();
    const std::vector<ActionEntry> traced = log.stop_trace();
    check_equal(traced.size(), 6U, "a trace holds what it has room for");
    check_equal(traced[5].microbatch, 5U, "and that is the first");
    log.set_cause(failure("the first").encode());
    log.set_cause(failure("the second").encode());
  }
  check(std::filesystem::exists(path), "a record outlives its rank's log");
  const Fd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  const auto status = status_in(file.get());
  check(status && status->rank == 1 && status->completed != 0, "and can be read");
  check_equal(status->last.microbatch, 9U, "its last action");
  const RecordFile record = read_record(path);
  check_equal(record.rank, 1U, "the rank of a file");
  check_equal(record.actions.size(), 3U, "the entry that may be half overwritten is left out");
  check_equal(record.actions.back().microbatch, 9U, "the last action in a file");
  check(Cause::decode(record.cause).message == "the first", "the cause in a file");
  std::filesystem::resize_file(path, std::filesystem::file_size(path) - 1);
  expect(Fault::protocol, [&] { (void)read_record(path); }, "a file whose cause is cut off");
  std::filesystem::resize_file(path, 300);
  expect(Fault::protocol, [&] { (void)read_record(path); }, "a file whose actions are cut off");
  std::filesystem::resize_file(path, 8);
  expect(Fault::protocol, [&] { (void)read_record(path); }, "a file without a header");
  expect(Fault::system, [&] { (void)read_record(path + "-of-no-rank"); }, "a file that does not exist");
  {
    ActionLog again(1, 4, path);
    again.discard();
  }
  check(!std::filesystem::exists(path), "a record that is not wanted is removed");
  check(!status_in(-1) && !status_in(STDIN_FILENO), "what is no record is none");
  expect(Fault::system, [] { ActionLog nowhere(0, 4, "/nonexistent/record"); }, "a folder that is not there");
}

// A ring of hubs: every rank asks while all of them work, one of them fails and some leave.
void questions(std::uint64_t seed, std::uint64_t rounds) {
  constexpr std::size_t size = 4;
  constexpr std::chrono::hours lately{1};
  for (std::uint64_t round = 0; round < rounds; ++round) {
    Random random(seed + round);
    std::array<std::unique_ptr<Hub>, size> hubs;
    std::array<std::shared_ptr<ActionLog>, size> logs;
    for (std::size_t i = 0; i < size; ++i) {
      hubs[i] = std::make_unique<Hub>(static_cast<int>(i));
      logs[i] = std::make_shared<ActionLog>(static_cast<int>(i), 16, "");
      hubs[i]->set_action_log(logs[i]);
    }
    for (std::size_t i = 0; i < size; ++i) join(*hubs[i], *hubs[(i + 1) % size]);
    for (auto& hub : hubs) hub->start();
    for (std::size_t i = 0; i < size; ++i) hubs[i]->share_record(static_cast<int>((i + 1) % size), policy());
    const std::size_t busy = random.below(size);
    logs[busy]->set_busy("writing");
    check_equal(hubs[(busy + 2) % size]->ask(size, policy()).size(), size, "answers of a whole pipeline");
    check(hubs[(busy + 1) % size]->any_rank_is_busy(size, lately), "a rank is busy");
    logs[busy]->set_busy("");
    check(hubs[(busy + 1) % size]->any_rank_is_busy(size, lately), "a rank was busy just now");
    check(!hubs[(busy + 1) % size]->any_rank_is_busy(size, std::chrono::nanoseconds(1)), "no rank is busy");
    std::vector<std::thread> threads;
    for (std::size_t i = 0; i < size; ++i) {
      threads.emplace_back([&, i] {
        try {
          for (std::uint32_t n = 0; n < 200; ++n) logs[i]->begin(static_cast<std::uint32_t>(i), 0, n);
        } catch (const Error& error) {
          check(error.fault() == Fault::aborted && hubs[i]->cause(), "only a failure stops actions");
        }
      });
      threads.emplace_back([&, i, quits = random.once_in(3), fails = random.once_in(3)] {
        for (int n = 0; n < 3; ++n) (void)hubs[i]->ask(size, policy(std::chrono::milliseconds(50)));
        if (fails) hubs[i]->abort(failure("error"));
        if (quits) hubs[i]->close();
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
}

// Ranks 0 and 1 run steps of three actions and wait for nothing; one of them fails, or a third thread fails rank 0.
void stops(std::uint64_t seed, std::uint64_t rounds) {
  for (std::uint64_t round = 0; round < rounds * 20; ++round) {
    Random random(seed + round);
    std::array<std::unique_ptr<Hub>, 2> hubs{std::make_unique<Hub>(0), std::make_unique<Hub>(1)};
    std::array<std::shared_ptr<ActionLog>, 2> logs;
    for (std::size_t i = 0; i < 2; ++i) {
      logs[i] = std::make_shared<ActionLog>(static_cast<int>(i), 16, "");
      hubs[i]->set_action_log(logs[i]);
    }
    join(*hubs[0], *hubs[1]);
    for (auto& hub : hubs) hub->start();
    const std::uint64_t last = random.below(300);
    const std::size_t culprit = random.below(3);
    std::array<std::uint64_t, 2> steps{};
    std::vector<std::thread> threads;
    for (std::size_t i = 0; i < 2; ++i) {
      threads.emplace_back([&, i] {
        std::uint32_t n = 0;
        const auto run = [&] {
          for (;;) {  // if an action did not check for failures, this would never end
            logs[i]->step();
            ++steps[i];
            for (int action = 0; action < 3; ++action, ++n) {
              logs[i]->begin(static_cast<std::uint32_t>(i), 0, n);
              if (culprit == i && n == last) hubs[i]->abort(failure("error"), steps[i]);
            }
            logs[i]->end();
          }
        };
        expect(Fault::aborted, run, "a rank that runs when another one has failed");
        check(hubs[i]->cause().has_value(), "a rank that is stopped finds the cause");
        const std::vector<ActionEntry> kept = logs[i]->actions();
        if (n > 0) check_equal(kept.back().microbatch, n - 1, "no action begins after the failure");
        if (n > 0) check(kept.back().end != 0, "and the one before it has ended");
        expect(Fault::aborted, [&] { logs[i]->end(); }, "the end of a list of actions");
        if (n > 0) expect(Fault::aborted, [&] { logs[i]->begin(0, 0, n - 1); }, "an action again");
      });
    }
    if (culprit == 2) threads.emplace_back([&] { hubs[0]->abort(failure("link")); });
    for (std::thread& thread : threads) thread.join();
    if (culprit < 2) check(steps[1 - culprit] >= steps[culprit], "a step before the one that failed was stopped");
  }
}

// The record of a rank that dies stays with its neighbour.
void last_words() {
  auto [mine, theirs] = socket_pair();
  Hub hub(0);
  hub.add_peer(1, std::move(mine));
  hub.start();
  ActionLog record(1, 8, "");
  record.step();
  record.begin(1, 0, 4);
  record.begin(1, 4, 4);
  {
    Hub peer(1);
    peer.add_peer(0, std::move(theirs));
    peer.set_action_log(std::make_shared<ActionLog>(1, 8, ""));
    peer.share_record(0, policy());
    peer.send(0, FrameType::envelope, 0, 0, "here", policy());
    (void)hub.take(1, FrameType::envelope, 0, policy());
    peer.abandon();  // as if it were killed; it has no thread
  }
  while (!hub.cause()) std::this_thread::yield();
  const std::vector<RankReport> reports = hub.cause()->reports;
  check_equal(reports.size(), 1U, "the cause says what it did");
  check_equal(reports[0].status.rank, 1U, "whose record it is");
}

}  // namespace
}  // namespace pypipe::test

int main(int count, char** values) {
  using namespace pypipe::test;
  const std::uint64_t seed = argument(count, values, 1, 1);
  const std::uint64_t rounds = argument(count, values, 2, 20);
  const std::size_t descriptors = open_descriptors();
  begin("readers of a ring", 60);
  readers(rounds * 20'000);
  begin("traces and files");
  traces_and_files();
  begin("questions", 120);
  questions(seed, rounds);
  begin("ranks that run when another one fails", 60);
  stops(seed, rounds);
  begin("the record of a rank that died");
  last_words();
  check_equal(open_descriptors(), descriptors, "descriptors open at the end");
  std::printf("action_log_stress: seed %llu, %llu rounds\n", static_cast<unsigned long long>(seed),
              static_cast<unsigned long long>(rounds));
}
