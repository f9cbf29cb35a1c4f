#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <string>

#include "bindings/conversions.hpp"
#include "bindings/module.hpp"

namespace geartrain {
namespace {

nb::object errors() { return nb::module_::import_("geartrain.ams.values.errors"); }

// Names and classes that every call needs are looked up once, and never released: the interpreter is gone before static
// variables are destroyed.
#define GEARTRAIN_NAME(text)                                          \
  ([]() -> nb::handle {                                               \
    static const nb::handle name = PyUnicode_InternFromString(text);  \
    return name;                                                      \
  }())

nb::object of_messages(const char* name) {
  return nb::module_::import_("geartrain.ams.values.shard_messages").attr(name);
}

// Not a static variable, whose initialisation holds a C++ lock: an import may release the interpreter lock meanwhile.
nb::handle done_class() {
  static nb::handle found;
  if (!found.is_valid()) found = of_messages("Done").release();
  return found;
}

// Text may come from another process, or be cut.
nb::object text_of(const std::string& text) {
  return nb::steal(PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "backslashreplace"));
}

int64_t number_of(nb::handle value, nb::handle name) {
  const nb::object number = nb::getattr(value, name);
  int64_t result = 0;
  if (!nb::try_cast(number, result))
    throw Fault("InvalidArgument", nb::cast<std::string>(name) + " is " + nb::cast<std::string>(nb::str(number)) +
                                       "; it must be a whole number below 2**63");
  return result;
}

// Returns the name of an error's class, or of its nearest base class that callers know.
std::string public_name(nb::handle kind) {
  for (const nb::handle base : kind.attr("__mro__")) {
    const std::string name = nb::cast<std::string>(base.attr("__name__"));
    if (errors().attr("error_named")(name).is(base)) return name;
  }
  return "InternalError";
}

// Reports an error that cannot be raised, as the interpreter reports those of destructors.
void show(nb::python_error& error, nb::handle where) {
  error.restore();
  PyErr_WriteUnraisable(where.ptr());
}

}  // namespace

nb::object error_of(const Fault& fault) {
  const nb::object kind = errors().attr("error_named")(fault.name), message = text_of(fault.message);
  return fault.name == "Busy" ? kind(message, fault.retry_after_seconds) : kind(message);
}

Fault fault_of(nb::handle error) {
  if (!nb::isinstance(error, errors().attr("GeartrainError")))
    return {"InternalError", nb::cast<std::string>(nb::repr(error))};
  const nb::object retry_after = nb::getattr(error, "retry_after_seconds", nb::float_(0.0));
  return {public_name(error.type()), nb::cast<std::string>(nb::str(error)), nb::cast<double>(retry_after)};
}

CallContext context_of(nb::handle context) {
  return {.stream = nb::cast<std::string>(nb::getattr(context, GEARTRAIN_NAME("stream"))),
          .incarnation = number_of(context, GEARTRAIN_NAME("incarnation")),
          .sequence = number_of(context, GEARTRAIN_NAME("sequence")),
          .oldest_unacknowledged = number_of(context, GEARTRAIN_NAME("oldest_unacknowledged")),
          .shard_incarnation = number_of(context, GEARTRAIN_NAME("shard_incarnation")),
          .cluster_version = number_of(context, GEARTRAIN_NAME("cluster_version")),
          .table_incarnation = number_of(context, GEARTRAIN_NAME("table_incarnation"))};
}

SyncGroup group_of(nb::handle group) {
  return {.job = nb::cast<std::string>(group.attr("job")),
          .world_size = number_of(group, GEARTRAIN_NAME("world_size")),
          .rank = number_of(group, GEARTRAIN_NAME("rank")),
          .sequence = number_of(group, GEARTRAIN_NAME("sequence")),
          .sample_count = number_of(group, GEARTRAIN_NAME("sample_count"))};
}

nb::object python_of(const Done& done) {
  return done_class()(nb::arg("created") = done.created, nb::arg("duplicate") = done.duplicate);
}

std::shared_ptr<nb::object> kept(nb::object object) {
  return {new nb::object(std::move(object)), [](nb::object* held) {
            if (!Py_IsInitialized() || is_interpreter_gone()) return;  // its memory goes with the process
            const WithInterpreter interpreter;
            delete held;
          }};
}

Completion completion_of(nb::object future) {
  return [held = kept(std::move(future))](const Outcome& outcome) {
    const WithInterpreter interpreter;
    try {
      if (const Done* done = std::get_if<Done>(&outcome))
        held->attr(GEARTRAIN_NAME("set_result"))(python_of(*done));
      else
        held->attr("set_exception")(error_of(std::get<Fault>(outcome)));
    } catch (nb::python_error& error) {
      show(error, *held);
    }
  };
}

Scalars scalars_of(nb::handle numbers) {
  Scalars scalars;
  if (nb::len(numbers) > 0)
    for (const nb::handle item : numbers.attr("items")())
      scalars.emplace_back(nb::cast<std::string>(item[0]), nb::cast<double>(item[1]));
  return scalars;
}

BatchFacts batch_of(nb::handle batch, size_t count) {
  BatchFacts facts;
  if (batch.is_none()) return facts;
  const nb::object occurrences = nb::getattr(batch, GEARTRAIN_NAME("occurrences")),
                   step = nb::getattr(batch, GEARTRAIN_NAME("step"));
  const nb::object unix_seconds = nb::getattr(batch, GEARTRAIN_NAME("unix_seconds")),
                   pulled_at = nb::getattr(batch, GEARTRAIN_NAME("pulled_at"));
  if (!occurrences.is_none()) {
    const auto array =
        nb::cast<nb::ndarray<const uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>>(occurrences, false);
    if (array.size() != count)
      throw Fault("InvalidRows", std::to_string(array.size()) + " occurrences for " + std::to_string(count) +
                                     " ids; there must be one per id");
    facts.occurrences = array.data();
  }
  if (!step.is_none()) facts.step = number_of(batch, GEARTRAIN_NAME("step"));
  if (!unix_seconds.is_none()) facts.unix_seconds = nb::cast<double>(unix_seconds);
  if (!pulled_at.is_none()) facts.pulled_at = number_of(batch, GEARTRAIN_NAME("pulled_at"));
  return facts;
}

bool look_for_signals() {
  const WithInterpreter interpreter;
  if (PyErr_CheckSignals() != 0) throw nb::python_error();
  return false;
}

Clock clock_of(nb::object clock, double (*native)()) {
  if (clock.is_none() || clock.is(nb::module_::import_("time").attr("monotonic"))) return native;
  return [held = kept(std::move(clock))] {
    const WithInterpreter interpreter;
    return nb::cast<double>((*held)());
  };
}

size_t HostedUpdate::bytes() const {
  const WithInterpreter interpreter;
  size_t sum = 0;
  for (const nb::handle inputs : update_->attr("inputs"))
    for (const nb::handle array : inputs.attr("arrays").attr("values")()) sum += nb::cast<size_t>(array.attr("nbytes"));
  return sum;
}

Fingerprint HostedUpdate::fingerprint(Fingerprint begin) const {
  const WithInterpreter interpreter;
  const nb::callable sorted = nb::module_::import_("builtins").attr("sorted");
  Fingerprint seen = begin;
  for (const nb::handle inputs : update_->attr("inputs")) {
    const nb::object arrays = inputs.attr("arrays"), names = sorted(arrays);
    nb::list told;
    told.append(update_->attr("model"));
    told.append(sorted(inputs.attr("settings").attr("items")()));
    for (const char* number : {"seed", "step", "weight"}) told.append(inputs.attr(number));
    for (const nb::handle name : names)
      told.append(nb::make_tuple(name, arrays[name].attr("dtype").attr("name"), arrays[name].attr("shape")));
    const nb::str text = nb::repr(told);
    seen = murmur3(text.c_str(), static_cast<size_t>(nb::len(text.attr("encode")())), seen);
    for (const nb::handle name : names) {
      const auto array = nb::cast<nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>>(arrays[name]);
      seen = geartrain::fingerprint(array.data(), array.nbytes(), seen);
    }
  }
  return seen;
}

RankWrite rank_write_of(nb::object update) {
  RankWrite write;
  PushRequest& push = write.push;
  push.group = group_of(update.attr("group"));
  push.lr = nb::cast<std::optional<double>>(update.attr("lr"));
  push.scale = nb::cast<double>(update.attr("scale"));
  push.step_goes_on = nb::cast<bool>(update.attr("step_goes_on"));
  push.scalars = scalars_of(update.attr("optimizer_scalars"));
  write.hosted = std::make_shared<HostedUpdate>(std::move(update));
  return write;
}

}  // namespace geartrain
