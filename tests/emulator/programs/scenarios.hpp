// The call sequences that hazards.cpp runs, each in a correct and in a broken form.
#pragma once

#include <vector>

#include "pair.hpp"

namespace pypipe::test {

struct Scenario {
  const char* name;
  const char* kinds;  // of the reports that the planted bug must cause, separated by |
  void (*run)(Rank& rank, bool planted);
};

// scenarios_memory.cpp
void no_wait_before_a_send(Rank& rank, bool planted);
void no_wait_after_a_receive(Rank& rank, bool planted);
void a_slot_reused_one_event_too_early(Rank& rank, bool planted);
void a_freed_send_buffer(Rank& rank, bool planted);
void a_freed_tensor(Rank& rank, bool planted);
void host_writes_a_buffer_being_sent(Rank& rank, bool planted);
void an_order_through_the_peer(Rank& rank, bool planted);

// scenarios_end.cpp
void aborts_one_by_one(Rank& rank, bool planted);
void aborts_of_an_old_release(Rank& rank, bool planted);
void a_free_behind_a_receive(Rank& rank, bool planted);
void a_first_launch_behind_a_receive(Rank& rank, bool planted);
void registered_at_one_end(Rank& rank, bool planted);
void deregistered_in_use(Rank& rank, bool planted);

// scenarios_order.cpp
void crossed_order_above_the_staging(Rank& rank, bool planted);
void crossed_order_below_the_staging(Rank& rank, bool planted);
void opposite_transfers_one_communicator(Rank& rank, bool planted);
void opposite_transfers_fused(Rank& rank, bool planted);
void one_resident_operation(Rank& rank, bool planted);
void one_hardware_queue(Rank& rank, bool planted);
void connections_in_different_orders(Rank& rank, bool planted);
void creations_in_different_orders(Rank& rank, bool planted);
void an_event_recorded_in_progress(Rank& rank, bool planted);
void a_launch_order_that_contradicts_the_data(Rank& rank, bool planted);
void a_serial_launch_order(Rank& rank, bool planted);

inline const std::vector<Scenario>& scenarios() {
  static const std::vector<Scenario> all{
      {"no_wait_before_a_send", "race", no_wait_before_a_send},
      {"no_wait_after_a_receive", "race", no_wait_after_a_receive},
      {"a_slot_reused_one_event_too_early", "race", a_slot_reused_one_event_too_early},
      {"a_freed_send_buffer", "freed|race", a_freed_send_buffer},
      {"a_freed_tensor", "freed|race", a_freed_tensor},
      {"host_writes_a_buffer_being_sent", "race", host_writes_a_buffer_being_sent},
      {"an_order_through_the_peer", "race", an_order_through_the_peer},
      {"crossed_order_above_the_staging", "hang", crossed_order_above_the_staging},
      {"crossed_order_below_the_staging", "hang", crossed_order_below_the_staging},
      {"opposite_transfers_one_communicator", "hang", opposite_transfers_one_communicator},
      {"opposite_transfers_fused", "hang", opposite_transfers_fused},
      {"one_resident_operation", "hang", one_resident_operation},
      {"one_hardware_queue", "hang", one_hardware_queue},
      {"connections_in_different_orders", "hang", connections_in_different_orders},
      {"aborts_one_by_one", "hang", aborts_one_by_one},
      {"aborts_of_an_old_release", "hang", aborts_of_an_old_release},
      {"a_free_behind_a_receive", "hang", a_free_behind_a_receive},
      {"a_first_launch_behind_a_receive", "hang", a_first_launch_behind_a_receive},
      {"registered_at_one_end", "registered", registered_at_one_end},
      {"deregistered_in_use", "registered", deregistered_in_use},
      {"creations_in_different_orders", "hang", creations_in_different_orders},
      {"an_event_recorded_in_progress", "in_progress", an_event_recorded_in_progress},
      {"a_launch_order_that_contradicts_the_data", "hang", a_launch_order_that_contradicts_the_data},
      {"a_serial_launch_order", "hang", a_serial_launch_order},
  };
  return all;
}

}  // namespace pypipe::test
