// Rights of a connection, from its opener's certificate and token, with an expiry.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace geartrain {

// Bits, as RIGHTS of ams/rpc/tokens.py.
inline constexpr uint32_t kMayRead = 1, kMayWrite = 2;

// Thread-safe.
class Grant {
 public:
  // A pattern of table names, in which * matches any characters, with rights.
  using Rule = std::pair<std::string, uint32_t>;
  struct Refusal {
    std::string table;
    uint32_t rights;
  };

  // `job`: pattern of the jobs whose write streams it may use. Valid until a time in unix seconds.
  Grant(const std::string& job, std::vector<Rule> rules, double until)
      : job_(job), of_job_(job + "/*"), rules_(std::move(rules)), until_(until) {}
  // Returns the rights to a table, of all rules together.
  uint32_t rights(std::string_view table) const;
  // Whether a job or write stream belongs to the granted job (JOB or JOB/...), or to none.
  bool owns(std::string_view name) const;
  bool is_over() const;
  // Ends it early. Idempotent.
  void end() { has_ended_ = true; }
  // Records a refusal; the first few are kept until pop_refused().
  void refused(const std::string& table, uint32_t rights);
  // (kept refusals, number of all)
  std::pair<std::vector<Refusal>, size_t> pop_refused();

 private:
  const std::string job_, of_job_;
  const std::vector<Rule> rules_;
  const double until_;
  std::atomic<bool> has_ended_ = false;
  std::mutex mutex_;  // guards what follows
  std::vector<Refusal> refused_;
  size_t num_refused_ = 0;
};

}  // namespace geartrain
