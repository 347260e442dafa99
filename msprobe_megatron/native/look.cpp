// Which tensor is this, has it been measured, and if not, measure it: one call for what takes twenty in Python.
//
// Compiled by build.py against the headers of the torch and the Python that are running, and only used with them. Reads
// the fields of a tensor and changes none. The twin in Python is measure/once.py; what is not a plain strided tensor of host
// memory is left to it. The interpreter's lock is held throughout.

#include <Python.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>

#include <string>
#include <unordered_map>

namespace {

constexpr long NO_ROOM = -2, NOT_MINE = -3;
constexpr int MOST_DIMS = 16, MOST_TYPES = 128;
constexpr size_t PRUNE_FROM = 4096;
typedef void (*Stats)(const void*, int64_t, int64_t, const void*, void*);

// Lazy, wrapped or elsewhere: their memory does not say what they are.
const c10::DispatchKeySet ODD({
    c10::DispatchKey::Conjugate, c10::DispatchKey::Negative, c10::DispatchKey::ZeroTensor, c10::DispatchKey::Python,
    c10::DispatchKey::Functionalize, c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::FuncTorchGradWrapper,
    c10::DispatchKey::Quantized, c10::DispatchKey::Sparse, c10::DispatchKey::NestedTensor,
});

// What all pages of a probe share.
struct Eye {
    PyObject_HEAD
    PyObject *take, *addresses, *tensor, *parameter, *cdata, *keep;
    Stats stats;
    int64_t codes[MOST_TYPES], values[MOST_TYPES];
};

struct Memory {
    std::unordered_map<std::string, long> slots;
    // A weak reference keeps the address of a storage from being given to another, though not its memory.
    std::unordered_map<c10::StorageImpl*, c10::weak_intrusive_ptr<c10::StorageImpl>> storages;
    size_t prune_at = PRUNE_FROM;

    void prune() {
        for (auto at = slots.begin(); at != slots.end();) {
            c10::StorageImpl* storage;
            memcpy(&storage, at->first.data(), sizeof storage);
            auto held = storages.find(storage);
            at = held == storages.end() || held->second.expired() ? slots.erase(at) : std::next(at);
        }
        for (auto at = storages.begin(); at != storages.end();)
            at = at->second.expired() ? storages.erase(at) : std::next(at);
        prune_at = 2 * storages.size() > PRUNE_FROM ? 2 * storages.size() : PRUNE_FROM;
    }
};

// What one step has seen.
struct Look {
    PyObject_HEAD
    Eye* eye;
    Memory* memory;
};

c10::TensorImpl* impl_of(const Eye* eye, PyObject* x) {
    PyObject* number = PyObject_GetAttr(x, eye->cdata);
    if (!number) return nullptr;
    auto* found = static_cast<c10::TensorImpl*>(PyLong_AsVoidPtr(number));
    Py_DECREF(number);
    return found;
}

bool plain(c10::TensorImpl* x) {
    return x->device_type() == c10::DeviceType::CPU && !x->key_set().has_any(ODD) && x->layout() == c10::kStrided &&
           x->has_storage() && !x->is_inference() && x->dim() <= MOST_DIMS;
}

std::string key_of(const c10::TensorImpl* x, c10::StorageImpl* storage) {
    int64_t words[4 + 2 * MOST_DIMS];
    auto sizes = x->sizes(), strides = x->strides();
    size_t n = 0;
    words[n++] = (int64_t)storage;
    words[n++] = x->storage_offset();
    words[n++] = (int64_t)x->dtype().toScalarType();
    words[n++] = (int64_t)x->version_counter().current_version();
    for (int64_t size : sizes) words[n++] = size;
    for (int64_t stride : strides) words[n++] = stride;
    return std::string(reinterpret_cast<const char*>(words), n * sizeof *words);
}

// The slot of a tensor: that in which it was measured before, or a new one. Below zero: no room, or not for us.
PyObject* see(Look* self, PyObject* x) {
    Eye* eye = self->eye;
    if ((PyObject*)Py_TYPE(x) != eye->tensor && (PyObject*)Py_TYPE(x) != eye->parameter) return PyLong_FromLong(NOT_MINE);
    auto* impl = impl_of(eye, x);
    if (!impl) return PyErr_Occurred() ? nullptr : PyLong_FromLong(NOT_MINE);
    try {
        if (!plain(impl) || !impl->is_non_overlapping_and_dense()) return PyLong_FromLong(NOT_MINE);
        auto type = (size_t)impl->dtype().toScalarType();
        if (type >= MOST_TYPES || eye->codes[type] < 0) return PyLong_FromLong(NOT_MINE);
        auto* storage = impl->unsafe_storage().unsafeGetStorageImpl();
        auto* begin = static_cast<const char*>(storage->data());
        if (!begin && impl->numel()) return PyLong_FromLong(NOT_MINE);
        std::string key = key_of(impl, storage);
        auto known = self->memory->slots.find(key);
        if (known != self->memory->slots.end()) return PyLong_FromLong(known->second);
        PyObject* taken = PyObject_CallNoArgs(eye->take);
        if (!taken) return nullptr;
        long slot = PyLong_AsLong(taken);
        Py_DECREF(taken);
        if (slot < 0) return PyErr_Occurred() ? nullptr : PyLong_FromLong(NO_ROOM);
        PyObject* address = PyList_GetItem(eye->addresses, slot);
        if (!address) return nullptr;
        // Taking a slot runs Python, and with it perhaps another thread: the memory is looked up once more.
        begin = static_cast<const char*>(impl->unsafe_storage().unsafeGetStorageImpl()->data());
        eye->stats(begin + impl->storage_offset() * (int64_t)impl->itemsize(), impl->numel(), eye->codes[type],
                   (const void*)eye->values[type], PyLong_AsVoidPtr(address));
        Memory* memory = self->memory;
        if (memory->storages.find(storage) == memory->storages.end()) {
            if (memory->storages.size() >= memory->prune_at) memory->prune();
            memory->storages.emplace(storage, impl->unsafe_storage().getWeakStorageImpl());
        }
        memory->slots[std::move(key)] = slot;
        return PyLong_FromLong(slot);
    } catch (const std::exception&) {
        return PyLong_FromLong(NOT_MINE);
    }
}

PyObject* forget(Look* self, PyObject*) {
    self->memory->slots.clear();
    self->memory->storages.clear();
    self->memory->prune_at = PRUNE_FROM;
    Py_RETURN_NONE;
}

Py_ssize_t length(PyObject* self) { return (Py_ssize_t)((Look*)self)->memory->slots.size(); }

int look_init(Look* self, PyObject* args, PyObject*) {
    PyObject* eye;
    if (!PyArg_ParseTuple(args, "O", &eye)) return -1;
    Py_INCREF(eye);
    self->eye = (Eye*)eye;
    self->memory = new Memory();
    return 0;
}

void look_free(Look* self) {
    delete self->memory;
    Py_XDECREF((PyObject*)self->eye);
    Py_TYPE(self)->tp_free((PyObject*)self);
}

// take, addresses of the slots, address of msprobe_stats, class of tensors, class of parameters, and for each dtype a
// tensor of it, its code in kernel.cpp and the address of its table of values; and who owns those tables.
int eye_init(Eye* self, PyObject* args, PyObject*) {
    PyObject *take, *addresses, *stats, *tensor, *parameter, *samples, *keep;
    if (!PyArg_ParseTuple(args, "OO!OOOO!O", &take, &PyList_Type, &addresses, &stats, &tensor, &parameter,
                          &PyList_Type, &samples, &keep))
        return -1;
    self->stats = (Stats)PyLong_AsVoidPtr(stats);
    self->cdata = PyUnicode_InternFromString("_cdata");
    if (!self->stats || !self->cdata) return -1;
    for (auto** one : {&take, &addresses, &tensor, &parameter, &keep}) Py_INCREF(*one);
    self->take = take;
    self->addresses = addresses;
    self->tensor = tensor;
    self->parameter = parameter;
    self->keep = keep;
    for (int n = 0; n < MOST_TYPES; n++) self->codes[n] = -1;
    for (Py_ssize_t n = 0; n < PyList_Size(samples); n++) {
        PyObject* sample;
        long long code, values;
        if (!PyArg_ParseTuple(PyList_GetItem(samples, n), "OLL", &sample, &code, &values)) return -1;
        auto* impl = impl_of(self, sample);
        if (!impl) return -1;
        auto type = (size_t)impl->dtype().toScalarType();
        if (type < MOST_TYPES) self->codes[type] = code, self->values[type] = values;
    }
    return 0;
}

void eye_free(Eye* self) {
    for (PyObject* one : {self->take, self->addresses, self->tensor, self->parameter, self->cdata, self->keep})
        Py_XDECREF(one);
    Py_TYPE(self)->tp_free((PyObject*)self);
}

PyMethodDef look_methods[] = {
    {"see", (PyCFunction)see, METH_O, "Slot of a tensor, measured now or before; -2: no room, -3: not for us."},
    {"forget_all", (PyCFunction)forget, METH_NOARGS, "Measure everything anew."},
    {nullptr, nullptr, 0, nullptr},
};
PySequenceMethods look_sequence = {length};
PyTypeObject eye_type = {PyVarObject_HEAD_INIT(nullptr, 0)};
PyTypeObject look_type = {PyVarObject_HEAD_INIT(nullptr, 0)};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "msprobe_look", nullptr, -1, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_msprobe_look(void) {
    eye_type.tp_name = "msprobe_look.Eye";
    eye_type.tp_basicsize = sizeof(Eye);
    eye_type.tp_flags = Py_TPFLAGS_DEFAULT;
    eye_type.tp_new = PyType_GenericNew;
    eye_type.tp_init = (initproc)eye_init;
    eye_type.tp_dealloc = (destructor)eye_free;
    look_type.tp_name = "msprobe_look.Look";
    look_type.tp_basicsize = sizeof(Look);
    look_type.tp_flags = Py_TPFLAGS_DEFAULT;
    look_type.tp_new = PyType_GenericNew;
    look_type.tp_init = (initproc)look_init;
    look_type.tp_dealloc = (destructor)look_free;
    look_type.tp_methods = look_methods;
    look_type.tp_as_sequence = &look_sequence;
    if (PyType_Ready(&eye_type) < 0 || PyType_Ready(&look_type) < 0) return nullptr;
    PyObject* module = PyModule_Create(&definition);
    if (!module) return nullptr;
    Py_INCREF(&eye_type);
    Py_INCREF(&look_type);
    PyModule_AddObject(module, "Eye", (PyObject*)&eye_type);
    PyModule_AddObject(module, "Look", (PyObject*)&look_type);
    return module;
}
