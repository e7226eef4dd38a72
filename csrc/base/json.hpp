// The little JSON that the core writes.
#pragma once

#include <string>
#include <string_view>

namespace pypipe {

// `text` as a JSON string. Control characters become spaces.
[[nodiscard]] inline std::string quoted(std::string_view text) {
  std::string result = "\"";
  for (const char letter : text) {
    if (letter == '"' || letter == '\\') result += '\\';
    result += static_cast<unsigned char>(letter) < 0x20 ? ' ' : letter;
  }
  return result + '"';
}

}  // namespace pypipe
