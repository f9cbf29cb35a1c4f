// Client end of TCP calls to a shard of another machine: frames, several calls in flight.
#pragma once

#include <memory>
#include <string>

#include "carriers/connection.hpp"
#include "tcp/tls.hpp"

namespace geartrain {

struct TcpLimits {
  size_t max_frame_bytes = kMaxCallBytes;
  size_t max_in_flight_bytes = size_t{1} << 30;  // a single call may be larger
  size_t max_records = Tls::kMaxRecords;        // with one key
};

// Connects to the shard that listens at `host` (a name or an address) and has offered `secret`; `uses_tls`: encrypted,
// with a peer that knows that secret. Throws std::runtime_error (or its child std::system_error): it is absent, too
// slow, or of another version; and the errors of Tls::load().
std::shared_ptr<Connection> connect_tcp(const std::string& host, uint16_t port, const std::string& secret,
                                        double timeout_seconds, bool uses_tls = false, const TcpLimits& limits = {});

}  // namespace geartrain
