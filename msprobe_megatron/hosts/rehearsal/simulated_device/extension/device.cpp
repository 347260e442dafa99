// A simulated accelerator: a PrivateUse1 backend whose kernels are the host's. The Python module of the extension.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "collectives.h"
#include "tensors.h"

namespace simulated {
namespace {

REGISTER_ALLOCATOR(kDevice, &allocator);
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);
at::HostAllocatorRegistry<kDevice> pinned_registered(&pinned_allocator);

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) { register_operators(m); }
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>()); }

// Registered by name, so that the kit sees an implementation for the device and takes no other: one launch each.
TORCH_LIBRARY_IMPL(msprobe, PrivateUse1, m) {
  m.impl("measure_into_slot", torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
  m.impl("measure_into_slots", torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

void trace(py::object callback) {
  tracing = false;
  Py_CLEAR(trace_callback);
  if (callback.is_none()) return;
  trace_callback = callback.release().ptr();
  tracing = true;
}

// For an operator of Python that wants the device's bytes as a kernel does: one launch, no copy.
at::Tensor kernel_view(const at::Tensor& t, bool write) {
  TORCH_CHECK(t.is_privateuseone(), "kernel_view: a tensor of the device is needed, not of ", t.device());
  Aliases aliases;
  const auto stale = touch(t, write, current_stream, "kernel_view");
  if (!write) return readable(t, stale, aliases);
  poison(t, stale);
  return aliases.of(t);
}

}  // namespace

void bind(py::module& m) {
  map_memory();
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  m.def("counts", [] { return counters.values(); });
  m.def("reset", [] { counters.reset(); });
  m.def("trace", &trace);
  m.def("plant", [](const std::string& name, int64_t value) { faults.of(name) = value; });
  m.def("set_gap", [](const std::string& name, bool on) { gaps.set(name, on); });
  m.def("memory", [] { return arena.live_and_peak(); });
  m.def("reset_peak_memory", [] { arena.reset_peak(); });
  m.def("total_memory", [] { return memory_limit > 0 ? memory_limit.load() : int64_t(kArena); });
  m.def("copies_under_way", [] { return order.copies_under_way(); });
  m.def("device_count", [] { return int(kDevices); });
  m.def("current_device", [] { return int(current_device); });
  m.def("set_device", [](int d) {
    TORCH_CHECK(d >= 0 && d < kDevices, "simulated device: there is no device ", d, "; accepted: 0 to ", kDevices - 1);
    current_device = c10::DeviceIndex(d);
  });
  m.def("default_generator", [](int i) { return default_generator(c10::DeviceIndex(i)); });
  m.def("count_launch", [](const std::string& what) { launched(what); });
  m.def("kernel_view", &kernel_view);
  m.def("hccl", [](c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size) {
    return c10::intrusive_ptr<c10d::Backend>(c10::make_intrusive<Backend>(std::move(gloo), rank, size));
  });
}

}  // namespace simulated

PYBIND11_MODULE(msprobe_simulated_device, m) { simulated::bind(m); }
