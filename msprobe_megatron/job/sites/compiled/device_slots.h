// Slots in the memory of a device: they are filled by the operator msprobe::measure_into_slot, of which every device
// has an implementation, whether of C++, Triton or torch. What is looked up and written down about a tensor is the same
// as for host memory.

#pragma once
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace {

// What is measured is no part of the training: no graph, no mode of the user's and no functional transform gets to see it.
const c10::DispatchKeySet OF_THE_JOB = c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::DispatchKeySet({
    c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot, c10::DispatchKey::Functionalize,
    c10::DispatchKey::FuncTorchDynamicLayerFrontMode, c10::DispatchKey::FuncTorchDynamicLayerBackMode,
});

at::Tensor tensor_of(c10::TensorImpl* impl) {
    return at::Tensor(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim_copy(impl));
}

struct DeviceSlots {
    typedef void Operation(const at::Tensor&, const at::Tensor&, bool, int64_t, int64_t);
    c10::TypedOperatorHandle<Operation> operation;
    c10::Device device;
    bool wide;

    DeviceSlots(c10::Device device, bool wide)
        : operation(c10::Dispatcher::singleton().findSchemaOrThrow("msprobe::measure_into_slot", "").typed<Operation>()),
          device(device), wide(wide) {}

    // Starts to fill the words of a slot, with a digest unless `cells` is below 0. An implementation in Python needs the interpreter's lock, which is held.
    void measure(c10::TensorImpl* x, c10::TensorImpl* row, int64_t cells, int64_t numbering) const {
        c10::impl::ExcludeDispatchKeyGuard apart(OF_THE_JOB);
        c10::AutoGradMode no_graph(false);
        operation.call(tensor_of(x), tensor_of(row), wide, cells, cells < 0 ? -1 : numbering);
    }
};

}  // namespace
