// What the device counts, the faults and gaps that can be switched on, and the callback that gets a Python stack.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <string>

namespace simulated {

namespace py = pybind11;

struct Counters {
  std::atomic<int64_t> launches{0}, syncs{0}, host_copies{0}, device_copies{0}, events{0}, races{0}, bytes{0},
      allocations{0};

  void reset() { launches = syncs = host_copies = device_copies = events = races = bytes = allocations = 0; }

  std::map<std::string, int64_t> values() const {
    return {{"launches", launches}, {"syncs", syncs},   {"host_copies", host_copies}, {"device_copies", device_copies},
            {"events", events},     {"races", races},   {"bytes", bytes},             {"allocations", allocations}};
  }
};
inline Counters counters;

// Faults: numbers of waits that are skipped, how long a copy to the host is under way, bytes after which memory ends.
struct Faults {
  std::map<std::string, std::atomic<int64_t>> values;

  Faults() {
    values["skip_event_synchronize"] = 0;
    values["skip_stream_wait"] = 0;
    values["skip_work_wait"] = 0;
    values["copy_microseconds"] = 100;
    values["memory_limit"] = 0;  // 0: the size of the arena
  }

  std::atomic<int64_t>& of(const std::string& name) {
    auto found = values.find(name);
    TORCH_CHECK(found != values.end(), "simulated device: there is no fault named ", name);
    return found->second;
  }

  // True if the wait that is about to happen is one that a test has asked to leave out.
  bool skips(std::atomic<int64_t>& left) {
    int64_t before = left.load();
    while (before > 0)
      if (left.compare_exchange_weak(before, before - 1)) return true;
    return false;
  }
};
inline Faults& faults = *new Faults;
inline auto& skip_event_synchronize = faults.of("skip_event_synchronize");
inline auto& skip_stream_wait = faults.of("skip_stream_wait");
inline auto& skip_work_wait = faults.of("skip_work_wait");
inline auto& copy_microseconds = faults.of("copy_microseconds");
inline auto& memory_limit = faults.of("memory_limit");

// What torch_npu or the hardware below it does not offer; all off unless a test asks.
struct Gaps {
  std::map<std::string, std::atomic<bool>> values;
  std::atomic<bool> any{false};

  Gaps() {
    for (auto name : {"float64_reductions", "float64_matmul", "int64_sums", "complex", "pin_memory_threads", "frexp"})
      values[name] = false;
  }

  std::atomic<bool>& of(const std::string& name) {
    auto found = values.find(name);
    TORCH_CHECK(found != values.end(), "simulated device: there is no gap named ", name);
    return found->second;
  }

  void set(const std::string& name, bool on) {
    of(name) = on;
    bool some = false;
    for (auto& value : values) some = some || value.second;
    any = some;
  }
};
inline Gaps& gaps = *new Gaps;
inline auto& gap_float64_reductions = gaps.of("float64_reductions");
inline auto& gap_float64_matmul = gaps.of("float64_matmul");
inline auto& gap_int64_sums = gaps.of("int64_sums");
inline auto& gap_complex = gaps.of("complex");
inline auto& gap_pin_memory_threads = gaps.of("pin_memory_threads");
inline auto& gap_frexp = gaps.of("frexp");

inline std::atomic<bool> tracing{false};
inline PyObject* trace_callback = nullptr;  // guarded by the GIL

// Calls callback(kind, what, dtype, numel) on the thread that caused it, so that its Python stack says who did.
inline void report(const char* kind, const std::string& what, const at::Tensor& t = {}) {
  if (!tracing.load(std::memory_order_relaxed) || !Py_IsInitialized()) return;
  py::gil_scoped_acquire gil;
  if (!trace_callback) return;
  const std::string dtype = t.defined() ? c10::toString(t.scalar_type()) : "";
  const long long numel = t.defined() ? t.numel() : -1;
  PyObject* type; PyObject* value; PyObject* traceback;
  PyErr_Fetch(&type, &value, &traceback);
  PyObject* answer = PyObject_CallFunction(trace_callback, "sssL", kind, what.c_str(), dtype.c_str(), numel);
  if (!answer) PyErr_WriteUnraisable(trace_callback);
  Py_XDECREF(answer);
  PyErr_Restore(type, value, traceback);
}

inline void host_waits(const std::string& what, const at::Tensor& t = {}) {
  counters.syncs++;
  report("sync", what, t);
}

inline void launched(const std::string& what, const at::Tensor& t = {}) {
  counters.launches++;
  report("launch", what, t);
}

}  // namespace simulated
