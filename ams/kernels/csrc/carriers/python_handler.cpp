#include "carriers/python_handler.hpp"

#include <nanobind/stl/function.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <tuple>

#include "base/module.hpp"
#include "engine/python.hpp"

namespace geartrain {
namespace {

// Half types as uint16. A view of memory that somebody else keeps.
nb::object matrix(const void* data, int64_t rows, int64_t columns, DType dtype) {
  const size_t shape[2] = {static_cast<size_t>(rows), static_cast<size_t>(columns)};
  const auto kind = dtype == DType::float32 ? nb::dtype<float>() : nb::dtype<uint16_t>();
  return nb::cast(nb::ndarray<nb::numpy, nb::ndim<2>>(const_cast<void*>(data), 2, shape, nb::handle(), nullptr, kind),
                  nb::rv_policy::reference);
}

template <class T>
nb::object vector(T* data, int64_t count) {
  const size_t shape[1] = {static_cast<size_t>(count)};
  return nb::cast(nb::ndarray<nb::numpy, T, nb::ndim<1>>(data, 1, shape, nb::handle()), nb::rv_policy::reference);
}

nb::object group_to(const std::optional<SyncGroup>& group) {
  if (!group) return nb::none();
  return nb::make_tuple(group->job, group->world_size, group->rank, group->sequence, group->sample_count);
}

// Called with the outcome of a write: Done or an error.
nb::object settler(Completion completion) {
  return nb::cpp_function([completion = std::move(completion)](nb::handle outcome) {
    if (PyExceptionInstance_Check(outcome.ptr())) completion(fault_of(outcome));
    else completion(done_of(outcome));
  });
}

template <class Call>
void with_python(const Call& call) {
  const nb::gil_scoped_acquire acquire;
  try {
    call();
  } catch (nb::python_error& error) {
    throw fault_of(error.value());
  }
}

}  // namespace

PythonHandler::PythonHandler(nb::object shard) : shard_(kept(std::move(shard))) {}

void PythonHandler::pull(const CallContext& context, const std::string& table, const PullRequest& request) {
  with_python([&] {
    const nb::object present = request.present == nullptr ? nb::none() : vector(request.present, request.count);
    shard_->attr("pull")(python_of(context), table, vector(request.ids, request.count),
                         matrix(request.rows, request.count, request.dim, request.dtype), static_cast<int>(request.dtype), present,
                         group_to(request.required_sync));
  });
}

void PythonHandler::push(const CallContext& context, const std::string& table, const PushRequest& request, Completion completion) {
  with_python([&] {
    nb::dict scalars;
    for (const auto& [name, value] : request.scalars) scalars[nb::cast(name)] = value;
    shard_->attr("push")(python_of(context), table, vector(request.ids, request.count),
                         matrix(request.gradients, request.count, request.dim, request.dtype), static_cast<int>(request.dtype),
                         request.lr, request.scale, scalars, group_to(request.group), request.step_goes_on,
                         settler(std::move(completion)));
  });
}

void PythonHandler::assign(const CallContext& context, const std::string& table, const AssignRequest& request, Completion completion) {
  with_python([&] {
    shard_->attr("assign")(python_of(context), table, vector(request.ids, request.count),
                           matrix(request.rows, request.count, request.dim, request.dtype), static_cast<int>(request.dtype),
                           settler(std::move(completion)));
  });
}

void PythonHandler::before_reply(bool has_writes) {
  with_python([&] { shard_->attr("before_reply")(has_writes); });
}

}  // namespace geartrain
