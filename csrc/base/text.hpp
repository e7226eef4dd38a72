// UTF-8 text of bounded length.
#pragma once

#include <cstddef>
#include <string_view>

namespace pypipe {

// The first `most` bytes of `text`, or a few less: a character is never cut.
[[nodiscard]] inline std::string_view clip(std::string_view text, std::size_t most) noexcept {
  if (text.size() <= most) return text;
  std::size_t length = most;
  while (length > 0 && (static_cast<unsigned char>(text[length]) & 0xC0U) == 0x80U) --length;
  return text.substr(0, length);
}

}  // namespace pypipe
