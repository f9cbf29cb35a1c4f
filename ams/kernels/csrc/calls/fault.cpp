#include "calls/fault.hpp"

#include <new>

#include "machine/memory_budget.hpp"
#include "machine/too_many_ids.hpp"

namespace geartrain {
namespace {

Fault worded(const std::string& of_whom) {
  try {
    throw;
  } catch (const Fault& fault) {
    return fault;
  } catch (const OverBudget& refused) {
    return {"OutOfMemory", refused.words()};
  } catch (const TooManyIds& refused) {
    return {"OutOfMemory", refused.words()};
  } catch (const TooManyRows& refused) {
    return {"TableFull", refused.words()};
  } catch (const std::bad_alloc&) {
    return {"OutOfMemory", of_whom + " is out of memory; the call changed nothing. Give its machine more memory"};
  } catch (const std::exception& error) {
    return {"InternalError", of_whom + ": " + error.what()};
  } catch (...) {
    return {"InternalError", of_whom + ": an unknown error"};
  }
}

}  // namespace

Fault fault_in_flight(const std::string& of_whom) noexcept {
  try {
    return worded(of_whom);
  } catch (...) {
    return {"OutOfMemory", "out of memory"};  // texts this short need no allocation
  }
}

}  // namespace geartrain
