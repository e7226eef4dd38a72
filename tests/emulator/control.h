// How a test steers the emulator and asks what it saw: libpypipe_emulator.so, C ABI (ctypes, dlsym or linking).
//
// Every knob is an environment variable PYPIPE_EMULATOR_<NAME>, read when the engine is first used, and can be set
// later with pypipe_emulator_set("<name>", "<value>"):
//
//   seed         0       all random choices of this process (mixed with $RANK, so that ranks differ)
//   delay_us     200     longest random delay before an operation of a stream, a frame of the wire, a start; 0: none
//   staging      65536   bytes of sends of one communicator that complete before their receives
//   resident     32      operations (NCCL kernels and launches) that the device holds at once
//   connections  0       hardware queues that the streams share, as CUDA_DEVICE_MAX_CONNECTIONS; 0: one per stream
//   lazy         1       the first use of an edge waits for the peer's first use of it; 0: connected from the start
//   in_progress  10      percent of a non-blocking communicator's calls that answer ncclInProgress without need
//   death        silent  what a communicator tells of a peer that died or aborted: silent (as over NVLink), or
//                        error (an asynchronous ncclRemoteError, as over a network)
//   scribble     1       a started receive fills its buffer with the poison at once
//   hang_ms      60000   report a hang when nothing moved for that long while something waits; 0: never
//   on_hazard    report  or exit: a hazard ends the process at once with code 97
//   report       (none)  file to which reports are appended; they always go to stderr too
//   version      0       what ncclGetVersion answers and the handshake compares; 0: the library's own (23007, or
//                        21805 for nccl218/libnccl.so.2, which lacks the optional symbols)
//   driver       13000   what cuDriverGetVersion answers; below 12030, an implicit launch order is a serial one
//   threads      together  one clock for all host threads: what one has waited for, all have; or separate: each knows
//                        only what it waited for itself (stricter, but locks between threads then look like mistakes)
//   lazy_loading 0       1: the first launch of each kind of kernel waits for the whole device, as lazy module loading does
//   default_stream  host  stream 0 is the calling thread; queue: one like the others, so that the host runs ahead
//   context      main    the process's first thread starts with device 0's primary context current; none: it does not
//   devices      1       devices of this process, 8 at most
//   multiprocessors  132 what cuDeviceGetAttribute says of them
//   fault        (none)  faults to inject, separated by commas; see pypipe_emulator_fault
//
// NCCL's own NCCL_LAUNCH_ORDER_IMPLICIT=1 is understood (from version 22600 on; from 23100 the communicator's
// configuration decides first): the kernels of all such communicators start in the order of issue.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
  const void* data;
  size_t bytes;
  int write;  // 0: the kernel reads it, 1: it writes it
} pypipe_emulator_range;

// Returns 0, or -1 for an unknown name or a value that is none. Setting the seed starts all random sequences anew.
int pypipe_emulator_set(const char* name, const char* value);

// Adds faults, `kind@n`, separated by commas. n counts the sends and receives that this process issues, from 1:
//   die@n    the process kills itself when operation n starts
//   error@n  operation n raises an asynchronous ncclRemoteError on its communicator and never ends (until an abort)
//   hang@n   operation n never ends, silently (until an abort)
//   size@n   operation n uses one byte less than it was told to
// Returns 0, or -1 when it means nothing. NULL or "" forgets all faults.
int pypipe_emulator_fault(const char* fault);

// How many sends and receives this process has issued: what the faults' n counts.
uint64_t pypipe_emulator_operations(void);

// Hazards reported so far; `kind` is NULL for all, or one of
//   race         two unordered accesses to the same bytes, one of which writes
//   freed        memory freed while an operation still uses it, or used after it was freed
//   bounds       an access that leaves its allocation, or bytes written around it
//   in_progress  an event recorded on, or a synchronization with, a stream that an unfinished call will still use
//   size         a send and its receive disagree about the size
//   usage        a call that the real library refuses or leaves undefined
//   registered   memory freed, or a communicator destroyed, while a buffer is still registered; memory deregistered
//                while a transfer may use it; a transfer with registered memory at one end only
//   context      a call without a current context, or with things of different devices
//   capture      a stream capture was broken
//   hang         nothing moves
uint64_t pypipe_emulator_hazards(const char* kind);

// The text of the latest report; returns its length. Writes at most `bytes` with the terminating zero.
size_t pypipe_emulator_last_report(char* text, size_t bytes);

// Calls that made the host wait for the device: cuStreamSynchronize, cuEventSynchronize, cuCtxSynchronize, cuMemFree, and
// ncclCommFinalize or ncclCommDestroy with operations pending. A wait of stream 0 for an event is not one: there it
// is the device's compute that waits.
uint64_t pypipe_emulator_host_synchronizations(void);

// Calls of cuMemAlloc and ncclMemAlloc.
uint64_t pypipe_emulator_allocations(void);

// Operations that streams have completed; nodes of the checker's interval map.
uint64_t pypipe_emulator_completed(void);
uint64_t pypipe_emulator_checker_nodes(void);

// Sets the counters of hazards, synchronizations and allocations to zero.
void pypipe_emulator_reset_counters(void);

// Names what this thread's following calls do, in reports: "2SEND_F0", or NULL for nothing.
void pypipe_emulator_label(const char* label);

// Names a stream in reports.
void pypipe_emulator_name_stream(void* stream, const char* name);

// Tells of accesses by compute on a stream. Stream 0 is the calling thread, now (but see default_stream); others: when the stream gets there.
void pypipe_emulator_reads(const void* data, size_t bytes, void* stream, const char* name);
void pypipe_emulator_writes(void* data, size_t bytes, void* stream, const char* name);

// Memory that is not from cuMemAlloc. `freed`, called before it really is freed, counts as a write by the calling
// thread and poisons the memory; an operation that still needs it is reported and given poison of its own. Of memory
// that was announced with `allocated`, a use after `freed` is reported too, until it is announced again.
void pypipe_emulator_allocated(const void* data, size_t bytes);
void pypipe_emulator_freed(void* data, size_t bytes);

// For memory whose allocator belongs to a stream, as torch's does: what uses it next is later work of that stream, which
// counts as a write. The host need not have waited for anything: operations that the stream waits for may still read it.
void pypipe_emulator_recycled(void* data, size_t bytes, void* stream);

// A kernel: `run(argument)` on the stream's own thread, occupying the device, with the accesses that are declared.
// `run` may be NULL.
void pypipe_emulator_launch(void* stream, const char* name, void (*run)(void*), void* argument,
                            const pypipe_emulator_range* ranges, size_t count);

// Blocks the calling thread until the stream has done all that was issued to it, and orders nothing: for a test whose
// compute really runs on the host while a stream stands for it.
void pypipe_emulator_settle(void* stream);

// With separate threads: the calling one is ordered after everything that the others know, as by a lock or a join
// that the emulator can't see.
void pypipe_emulator_join_threads(void);

#ifdef __cplusplus
}
#endif
