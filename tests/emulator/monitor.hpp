// A thread that notices when nothing moves, and says what everything waits for.
#pragma once

namespace pypipe::emulator {

void start_monitor();

}  // namespace pypipe::emulator
