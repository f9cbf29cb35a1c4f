// Client end of shared-memory calls to a shard of the same machine.
#pragma once

#include <memory>
#include <string>

#include "carriers/connection.hpp"

namespace geartrain {

struct RingLimits {
  double spin_seconds = 50e-6;       // how long a caller polls for its reply before it sleeps, where that pays
  double idle_seconds = 60;          // a mailbox that was free for so long is dropped at the next call
  double answer_seconds = 1;         // how long a call waits until the shard has accepted a new mailbox
  size_t max_pool_bytes = size_t{256} << 20;  // of all mailboxes together; a single one may be larger
  size_t max_mailboxes = 64;
};

// Numbers of mailboxes in use or free, for observers.
class RingConnection : public Connection {
 public:
  virtual size_t num_mailboxes() const = 0;
  // Whether a call was Refused.
  virtual bool has_refused() const = 0;
};

// Connects to the shard that listens under `name` in the abstract namespace and has offered `secret`. Throws
// std::runtime_error (or its child std::system_error): it is absent, too slow, or of another version or user.
std::shared_ptr<RingConnection> connect_ring(const std::string& name, const std::string& secret, double timeout_seconds,
                                             const RingLimits& limits = {});

}  // namespace geartrain
