// What tests of the core are made of: threads of no interpreter that push and pull, frames, a handler without rows.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <future>
#include <thread>
#include <vector>

#include "engine/engine.hpp"
#include "bindings/conversions.hpp"
#include "bindings/module.hpp"
#include "toy_handler.hpp"

namespace geartrain {
namespace {

using FloatMatrix = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

struct Work {
  Engine& engine;
  const std::string& table;
  const int64_t* ids;
  const float* gradients;
  int64_t count, dim, rounds;
  std::atomic<int64_t> acknowledged{0}, mixed{0};

  // Pushes and pulls in turns, as a caller of its own. What it pulls it has of one moment only if all numbers are
  // equal.
  void work(const std::string& stream) {
    std::vector<float> rows(static_cast<size_t>(count * dim));
    for (int64_t round = 1; round <= rounds; ++round) {
      CallContext context;
      context.stream = stream;
      context.incarnation = 1;
      context.sequence = context.oldest_unacknowledged = round;
      PushRequest push;
      push.ids = ids;
      push.count = count;
      push.dim = dim;
      push.gradients = reinterpret_cast<const char*>(gradients);
      engine.push(context, table, push, false,
                  [this](const Outcome& outcome) { acknowledged += std::holds_alternative<Done>(outcome); });
      PullRequest pull;
      pull.ids = ids;
      pull.count = pull.size = count;
      pull.dim = dim;
      pull.rows = reinterpret_cast<char*>(rows.data());
      engine.pull({}, table, pull);
      mixed += !std::all_of(rows.begin(), rows.end(), [&](float value) { return value == rows[0]; });
    }
  }
};

// Returns the numbers of acknowledged pushes and of pulls of mixed moments; the first is -1 if `num_threads` threads
// were not done after `seconds`. With `holds_interpreter` the calling thread has the interpreter lock all the while.
nb::tuple exercise(Engine& engine, const std::string& table, const IdArray& ids, const FloatMatrix& gradients,
                   int64_t rounds, int num_threads, bool holds_interpreter, double seconds) {
  require(gradients.shape(0) == ids.size(), "gradients must have one row per id");
  Work work{engine, table, ids.data(), gradients.data(), static_cast<int64_t>(ids.size()),
            static_cast<int64_t>(gradients.shape(1)), rounds};
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  bool are_done = true;
  const auto run = [&] {
    std::vector<std::future<void>> threads;
    for (int thread = 0; thread < num_threads; ++thread)
      threads.push_back(
          std::async(std::launch::async, [&, thread] { work.work("exercise/" + std::to_string(thread)); }));
    for (const auto& thread : threads) are_done &= thread.wait_until(deadline) == std::future_status::ready;
    if (are_done) return;
    const WithInterpreter interpreter;
    const WithoutInterpreter release;  // which they may wait for
    threads.clear();
  };
  if (holds_interpreter) {
    run();
  } else {
    const WithoutInterpreter release;
    run();
  }
  return nb::make_tuple(are_done ? work.acknowledged.load() : -1, work.mixed.load());
}

}  // namespace

void bind_frames(nb::module_& m);
void bind_groups(nb::module_& m);
void bind_test_connections(nb::module_& m);

void bind_test_helpers(nb::module_& m) {
  bind_frames(m);
  bind_groups(m);
  bind_test_connections(m);
  // Calls told(kind, table, rows, evicted) of every write that leaves the engine.
  m.def("observe_writes", [](Engine& engine, nb::callable told) {
    engine.observe([held = kept(std::move(told))](const RowChange& change) {
      const WithInterpreter interpreter;
      constexpr const char* kinds[] = {"push", "assign", "remove", "expire", "hosted"};
      (*held)(kinds[static_cast<int>(change.kind)], change.table, change.rows, change.evicted);
    });
  });
  nb::class_<ToyHandler, Handler>(m, "ToyHandler")
      .def(nb::init<>())
      .def("await_held", &ToyHandler::await_held, nb::arg("seconds"), nb::call_guard<WithoutInterpreter>())
      .def("release", &ToyHandler::release)
      .def("answer_later", &ToyHandler::answer_later, nb::call_guard<WithoutInterpreter>())
      .def("lose_lease", &ToyHandler::lose_lease)
      .def_prop_ro("num_writes", &ToyHandler::num_writes)
      .def_prop_ro("sum_written", &ToyHandler::sum_written);
  m.def("exercise_engine", &exercise, nb::arg("engine"), nb::arg("table"), nb::arg("ids").noconvert(),
        nb::arg("gradients").noconvert(), nb::arg("rounds"), nb::arg("num_threads"), nb::kw_only(),
        nb::arg("holds_interpreter"), nb::arg("seconds"));
}

}  // namespace geartrain
