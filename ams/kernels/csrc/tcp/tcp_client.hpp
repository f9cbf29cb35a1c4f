// The client's end of the way to a shard of another machine: frames over TCP, several calls in flight.
#pragma once

#include <memory>
#include <string>

#include "carriers/connection.hpp"

namespace geartrain {

struct TcpLimits {
  size_t most_frame_bytes = kMostCallBytes;
  size_t most_in_flight_bytes = size_t{1} << 30;  // unless it is one call
};

// Connects to the shard that listens at `host` (a name or an address) and has offered `secret`. Throws std::runtime_error (or its
// child std::system_error): it is not there, takes too long, or is no shard of this version.
std::shared_ptr<Connection> connect_tcp(const std::string& host, uint16_t port, const std::string& secret, double timeout_seconds,
                                        const TcpLimits& limits = {});

}  // namespace geartrain
