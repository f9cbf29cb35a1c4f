// What a connection may do: the rights of its opener's certificate and token, and until when.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace geartrain {

// Bits, as RIGHTS of ams/rpc/tokens.py has them.
inline constexpr uint32_t kMayRead = 1, kMayWrite = 2;

// Thread-safe.
class Grant {
 public:
  // A pattern of names of tables, in which * stands for any characters, and the rights to those.
  using Rule = std::pair<std::string, uint32_t>;
  struct Refusal {
    std::string table;
    uint32_t rights;
  };

  // `job`: whose streams of writes it may be, a pattern, too. Good until a time in unix seconds.
  Grant(const std::string& job, std::vector<Rule> rules, double until) : job_(job), of_job_(job + "/*"), rules_(std::move(rules)), until_(until) {}
  // To a table, by all rules together.
  uint32_t rights(std::string_view table) const;
  // Whether a job, or a stream of writes, is that of the job (JOB or JOB/...), or of no job.
  bool owns(std::string_view name) const;
  bool is_over() const;
  // Before its time. Idempotent.
  void end() { has_ended_ = true; }
  // Notes what was refused by it; the first few are kept until they are taken.
  void refused(const std::string& table, uint32_t rights);
  // (the kept ones, how many there were)
  std::pair<std::vector<Refusal>, size_t> take_refused();

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
