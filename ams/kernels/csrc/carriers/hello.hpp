// Handshake of a client: it sends the secret from the shard's offer, and is greeted.
#pragma once

#include <array>
#include <stdexcept>
#include <string>

#include "frames/frame.hpp"

namespace geartrain {

using Hello = std::array<char, sizeof(FrameHeader) + kSecretBytes>;

// `secret` has kSecretBytes.
inline Hello hello_with(const std::string& secret) {
  Hello hello;
  FrameHeader header;
  header.kind = FrameKind::hello;
  header.body_bytes = kSecretBytes;
  write_header(hello.data(), header);
  secret.copy(hello.data() + sizeof(FrameHeader), kSecretBytes);
  return hello;
}

// Throws std::runtime_error unless the header at `answer` is the shard's hello.
inline void require_greeting(const char* answer) {
  try {
    parse_header(answer, FrameKind::hello);
  } catch (const Fault& fault) {
    throw std::runtime_error(fault.message);
  }
}

}  // namespace geartrain
