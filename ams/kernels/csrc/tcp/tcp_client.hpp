// The client's end of the way to a shard of another machine: frames over TCP, several calls in flight.
#pragma once

#include <memory>
#include <string>

#include "carriers/connection.hpp"
#include "tcp/tls.hpp"

namespace geartrain {

struct TcpLimits {
  size_t most_frame_bytes = kMostCallBytes;
  size_t most_in_flight_bytes = size_t{1} << 30;  // unless it is one call
  size_t most_records = Tls::kMostRecords;        // under one key
};

// Connects to the shard that listens at `host` (a name or an address) and has offered `secret`; `uses_tls`: encrypted, and with nobody
// who does not know that secret. Throws std::runtime_error (or its child std::system_error): it is not there, takes too long, or is no
// shard of this version; and what Tls::load() does.
std::shared_ptr<Connection> connect_tcp(const std::string& host, uint16_t port, const std::string& secret, double timeout_seconds,
                                        bool uses_tls = false, const TcpLimits& limits = {});

}  // namespace geartrain
