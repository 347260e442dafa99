// Which tensor is this, has it been measured, and if not, measure it: one call for what takes twenty in Python.
//
// Compiled by build.py against the headers of the torch and the Python that are running, and only used with them. Reads
// the fields of a tensor and changes none. The twins in Python are measure/once.py and DumpProbe; what is not a plain
// strided tensor of host memory is left to them. The interpreter's lock is held throughout.

#include <Python.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>

#include <algorithm>
#include <memory_resource>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace {

constexpr long NO_ROOM = -2, NOT_MINE = -3;
constexpr int MOST_DIMS = 16, MOST_TYPES = 128;
constexpr size_t PRUNE_FROM = 4096;
// Freed storages are looked for with every tensor, among the more the larger it is: to measure it takes longer.
constexpr size_t SWEEP = 4, SWEEP_BYTES = 16 << 10;
typedef void (*Stats)(const void*, int64_t, int64_t, const void*, void*);
typedef void (*Strided)(const void*, int64_t, const int64_t*, const int64_t*, int64_t, const void*, void*);

// Lazy, wrapped or elsewhere: their memory does not say what they are.
const c10::DispatchKeySet ODD({
    c10::DispatchKey::Conjugate, c10::DispatchKey::Negative, c10::DispatchKey::ZeroTensor, c10::DispatchKey::Python,
    c10::DispatchKey::Functionalize, c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::FuncTorchGradWrapper,
    c10::DispatchKey::Quantized, c10::DispatchKey::Sparse, c10::DispatchKey::NestedTensor,
});

struct Ref {
    PyObject* object;
    Ref(PyObject* x = nullptr) : object(x) { Py_XINCREF(x); }
    Ref(const Ref& other) : Ref(other.object) {}
    Ref& operator=(Ref other) { return std::swap(object, other.object), *this; }
    ~Ref() { Py_XDECREF(object); }
};

// The cells that the rows of a place have in common, and the shape and dtype for which they hold.
struct Common {
    Ref place, layout, dtype, extra;
    c10::ScalarType type;
    std::vector<int64_t> sizes;
};

// What all pages of a probe share.
struct Eye {
    PyObject_HEAD
    std::unordered_map<PyObject*, Common>* places;
    PyObject *take, *addresses, *tensor, *parameter, *cdata, *keep;
    Stats stats;
    Strided strided;
    int64_t codes[MOST_TYPES], values[MOST_TYPES];
    // What is remembered lives here and not among the tensors, whose memory it would cut into pieces.
    std::pmr::unsynchronized_pool_resource* pool;
};

// A storage that has been seen. The weak reference keeps its address from being given to another one, though not its
// memory; the number is its own for ever, so that what is known of a freed one is never taken for that of the next.
struct Held {
    c10::weak_intrusive_ptr<c10::StorageImpl> weak;
    c10::StorageImpl* address;
    int64_t number;
};

struct Memory {
    std::pmr::unordered_map<std::pmr::string, long> slots;
    std::pmr::unordered_map<c10::StorageImpl*, size_t> places;  // in `held`
    std::pmr::vector<Held> held;
    size_t at = 0, prune_at = PRUNE_FROM;
    int64_t next = 0;

    explicit Memory(std::pmr::memory_resource* pool) : slots(pool), places(pool), held(pool) {}

    int64_t number_of(c10::TensorImpl* x) {
        auto* storage = x->unsafe_storage().unsafeGetStorageImpl();
        auto found = places.find(storage);
        if (found != places.end()) return held[found->second].number;
        held.push_back({x->unsafe_storage().getWeakStorageImpl(), storage, next});
        places.emplace(storage, held.size() - 1);
        return next++;
    }

    // Let go of storages that were freed, looking at so many. The few bytes that a weak reference leaves of a storage
    // lie between the data of tensors: until they go, the allocator cannot join what is free on either side of them.
    void sweep(size_t count) {
        for (count = std::min(count, held.size()); count-- && !held.empty(); at++) {
            if (at >= held.size()) at = 0;
            if (!held[at].weak.expired()) continue;
            places.erase(held[at].address);
            if (at + 1 < held.size()) {
                held[at] = std::move(held.back());
                places[held[at].address] = at;
            }
            held.pop_back();
        }
    }

    void prune() {
        sweep(held.size());
        std::unordered_set<int64_t> alive;
        for (auto& one : held) alive.insert(one.number);
        for (auto one = slots.begin(); one != slots.end();) {
            int64_t number;
            memcpy(&number, one->first.data(), sizeof number);
            one = alive.count(number) ? std::next(one) : slots.erase(one);
        }
        prune_at = std::max(PRUNE_FROM, 2 * slots.size());
    }

    void clear() {
        slots.clear();
        places.clear();
        held.clear();
        prune_at = PRUNE_FROM;
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

std::pmr::string key_of(const c10::TensorImpl* x, int64_t storage, std::pmr::memory_resource* pool) {
    int64_t words[4 + 2 * MOST_DIMS];
    auto sizes = x->sizes(), strides = x->strides();
    size_t n = 0;
    words[n++] = storage;
    words[n++] = x->storage_offset();
    words[n++] = (int64_t)x->dtype().toScalarType();
    words[n++] = (int64_t)x->version_counter().current_version();
    for (int64_t size : sizes) words[n++] = size;
    for (int64_t stride : strides) words[n++] = stride;
    return std::pmr::string(reinterpret_cast<const char*>(words), n * sizeof *words, pool);
}

// The slot of a tensor: that in which it was measured before, or a new one. Below zero: no room, or not for us.
PyObject* slot_of(Look* self, c10::TensorImpl* impl) {
    Eye* eye = self->eye;
    try {
        if (!plain(impl)) return PyLong_FromLong(NOT_MINE);
        auto type = (size_t)impl->dtype().toScalarType();
        if (type >= MOST_TYPES || eye->codes[type] < 0) return PyLong_FromLong(NOT_MINE);
        auto* storage = impl->unsafe_storage().unsafeGetStorageImpl();
        auto* begin = static_cast<const char*>(storage->data());
        if (!begin && impl->numel()) return PyLong_FromLong(NOT_MINE);
        Memory* memory = self->memory;
        memory->sweep(SWEEP + impl->numel() * impl->itemsize() / SWEEP_BYTES);
        auto key = key_of(impl, memory->number_of(impl), eye->pool);
        auto known = memory->slots.find(key);
        if (known != memory->slots.end()) return PyLong_FromLong(known->second);
        PyObject* taken = PyObject_CallNoArgs(eye->take);
        if (!taken) return nullptr;
        long slot = PyLong_AsLong(taken);
        Py_DECREF(taken);
        if (slot < 0) return PyErr_Occurred() ? nullptr : PyLong_FromLong(NO_ROOM);
        PyObject* address = PyList_GetItem(eye->addresses, slot);
        if (!address) return nullptr;
        // Taking a slot runs Python, and with it perhaps another thread: the memory is looked up once more.
        begin = static_cast<const char*>(impl->unsafe_storage().unsafeGetStorageImpl()->data());
        begin += impl->storage_offset() * (int64_t)impl->itemsize();
        auto* values = (const void*)eye->values[type];
        void* to = PyLong_AsVoidPtr(address);
        // Statistics do not depend on the order: what fills its memory is read as it lies.
        if (impl->is_non_overlapping_and_dense())
            eye->stats(begin, impl->numel(), eye->codes[type], values, to);
        else
            eye->strided(begin, impl->dim(), impl->sizes().data(), impl->strides().data(), eye->codes[type], values, to);
        if (memory->slots.size() >= memory->prune_at) memory->prune();
        memory->slots[std::move(key)] = slot;
        return PyLong_FromLong(slot);
    } catch (const std::exception&) {
        return PyLong_FromLong(NOT_MINE);
    }
}

PyObject* see(Look* self, PyObject* x) {
    Eye* eye = self->eye;
    if ((PyObject*)Py_TYPE(x) != eye->tensor && (PyObject*)Py_TYPE(x) != eye->parameter) return PyLong_FromLong(NOT_MINE);
    auto* impl = impl_of(eye, x);
    if (!impl) return PyErr_Occurred() ? nullptr : PyLong_FromLong(NOT_MINE);
    return slot_of(self, impl);
}

PyObject* forget(Look* self, PyObject*) {
    self->memory->clear();
    Py_RETURN_NONE;
}

PyObject* storages(Look* self, PyObject*) { return PyLong_FromSize_t(self->memory->held.size()); }

Py_ssize_t length(PyObject* self) { return (Py_ssize_t)((Look*)self)->memory->slots.size(); }

int look_init(Look* self, PyObject* args, PyObject*) {
    PyObject* eye;
    if (!PyArg_ParseTuple(args, "O", &eye)) return -1;
    Py_INCREF(eye);
    self->eye = (Eye*)eye;
    self->memory = new Memory(self->eye->pool);
    return 0;
}

void look_free(Look* self) {
    delete self->memory;
    Py_XDECREF((PyObject*)self->eye);
    Py_TYPE(self)->tp_free((PyObject*)self);
}

// take, addresses of the slots, addresses of msprobe_stats and msprobe_strided, class of tensors, class of parameters, and for each dtype a
// tensor of it, its code in kernel.cpp and the address of its table of values; and who owns those tables.
int eye_init(Eye* self, PyObject* args, PyObject*) {
    PyObject *take, *addresses, *stats, *strided, *tensor, *parameter, *samples, *keep;
    if (!PyArg_ParseTuple(args, "OO!OOOOO!O", &take, &PyList_Type, &addresses, &stats, &strided, &tensor, &parameter,
                          &PyList_Type, &samples, &keep))
        return -1;
    self->stats = (Stats)PyLong_AsVoidPtr(stats);
    self->strided = (Strided)PyLong_AsVoidPtr(strided);
    self->cdata = PyUnicode_InternFromString("_cdata");
    if (!self->stats || !self->strided || !self->cdata) return -1;
    for (auto** one : {&take, &addresses, &tensor, &parameter, &keep}) Py_INCREF(*one);
    self->pool = new std::pmr::unsynchronized_pool_resource();
    self->places = new std::unordered_map<PyObject*, Common>();
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
    delete self->places;
    delete self->pool;
    Py_TYPE(self)->tp_free((PyObject*)self);
}

PyTypeObject look_type = {PyVarObject_HEAD_INIT(nullptr, 0)}, notes_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

// Writes the row of a tensor: what DumpProbe.see does in Python, for places and dtypes that are known.
struct Notes {
    PyObject_HEAD
    Look *look, *weights;
    PyObject *clock, *dtypes, *names[5];
};
enum Name { SHAPE, LAYOUTS, DTYPE, SEQ, EXTRA };
// Far more than a step has rows: with fewer than that, each would be made anew in every step.
constexpr size_t MOST_PLACES = 1 << 18;
const char* const NAMES[] = {"shape", "layouts", "dtype", "seq", "extra"};

// What a dictionary has for an attribute of something, borrowed; null without an error where it is not known.
PyObject* looked_up(PyObject* dictionary, PyObject* of, PyObject* name) {
    PyObject* key = PyObject_GetAttr(of, name);
    if (!key) return nullptr;
    PyObject* found = PyDict_Check(dictionary) ? PyDict_GetItemWithError(dictionary, key) : nullptr;
    Py_DECREF(key);
    return found;
}

PyObject* next_number(Notes* self) {
    PyObject* now = PyObject_GetAttr(self->clock, self->names[SEQ]);
    if (!now) return nullptr;
    PyObject* next = PyLong_FromLong(PyLong_AsLong(now) + 1);
    int failed = !next || PyErr_Occurred() || PyObject_SetAttr(self->clock, self->names[SEQ], next) < 0;
    Py_XDECREF(next);
    if (failed) Py_CLEAR(now);
    return now;
}

// What the rows of a place have in common, as long as the shape stays; null where Python has to find it out first.
Common* common(Notes* self, PyObject* place, PyObject* x, c10::TensorImpl* impl) {
    auto& places = *self->look->eye->places;
    auto found = places.find(place);
    if (found != places.end() && found->second.type == impl->dtype().toScalarType() && impl->sizes() == found->second.sizes)
        return &found->second;
    PyObject* layouts = PyObject_GetAttr(place, self->names[LAYOUTS]);
    PyObject* layout = layouts ? looked_up(layouts, x, self->names[SHAPE]) : nullptr;
    PyObject* dtype = layout ? looked_up(self->dtypes, x, self->names[DTYPE]) : nullptr;
    PyObject* extra = dtype ? PyObject_GetAttr(place, self->names[EXTRA]) : nullptr;
    Py_XDECREF(layouts);
    if (!extra) return nullptr;
    if (places.size() >= MOST_PLACES) places.clear();
    Common fresh{place, layout, dtype, extra, impl->dtype().toScalarType(), impl->sizes().vec()};
    Py_DECREF(extra);
    return &(places[place] = std::move(fresh));
}

// place, tensor, microbatch, phase: the cells of the row; False: no room; None: to be seen in Python.
PyObject* row(Notes* self, PyObject* const* args, Py_ssize_t count) {
    if (count != 4) return PyErr_Format(PyExc_TypeError, "row() takes place, tensor, microbatch, phase");
    PyObject *place = args[0], *x = args[1];
    Eye* eye = self->look->eye;
    bool weight = (PyObject*)Py_TYPE(x) == eye->parameter;
    auto* impl = weight || (PyObject*)Py_TYPE(x) == eye->tensor ? impl_of(eye, x) : nullptr;
    Common* same = impl && plain(impl) ? common(self, place, x, impl) : nullptr;
    if (!same) {
        if (PyErr_Occurred()) return nullptr;
        Py_RETURN_NONE;
    }
    // To take a slot may run Python, and that may change what is known of places.
    Ref layout = same->layout, dtype = same->dtype, extra = same->extra;
    PyObject *slot = slot_of(weight ? self->weights : self->look, impl), *made = nullptr;
    long taken = slot ? PyLong_AsLong(slot) : 0;
    if (slot && taken >= 0) {
        PyObject* seq = next_number(self);
        if (seq)
            made = PyTuple_Pack(9, seq, args[2], args[3], place, layout.object, dtype.object, slot, extra.object, Py_None);
        Py_XDECREF(seq);
    } else if (slot) {
        made = Py_NewRef(taken == NO_ROOM ? Py_False : Py_None);
    }
    Py_XDECREF(slot);
    return made;
}

// The look at tensors, that at parameters, the clock, and the names of dtypes.
int notes_init(Notes* self, PyObject* args, PyObject*) {
    PyObject *look, *weights, *clock, *dtypes;
    if (!PyArg_ParseTuple(args, "O!O!OO!", &look_type, &look, &look_type, &weights, &clock, &PyDict_Type, &dtypes))
        return -1;
    for (int n = 0; n < 5; n++)
        if (!(self->names[n] = PyUnicode_InternFromString(NAMES[n]))) return -1;
    for (PyObject* one : {look, weights, clock, dtypes}) Py_INCREF(one);
    self->look = (Look*)look;
    self->weights = (Look*)weights;
    self->clock = clock;
    self->dtypes = dtypes;
    return 0;
}

void notes_free(Notes* self) {
    for (PyObject* one : {(PyObject*)self->look, (PyObject*)self->weights, self->clock, self->dtypes}) Py_XDECREF(one);
    for (PyObject* name : self->names) Py_XDECREF(name);
    Py_TYPE(self)->tp_free((PyObject*)self);
}

PyMethodDef notes_methods[] = {
    {"row", (PyCFunction)(void (*)(void))row, METH_FASTCALL, "Cells of a row; False: no room; None: not for us."},
    {nullptr, nullptr, 0, nullptr},
};
PyMethodDef look_methods[] = {
    {"see", (PyCFunction)see, METH_O, "Slot of a tensor, measured now or before; -2: no room, -3: not for us."},
    {"storages", (PyCFunction)storages, METH_NOARGS, "How many it has weak references to, freed ones among them."},
    {"forget_all", (PyCFunction)forget, METH_NOARGS, "Measure everything anew."},
    {nullptr, nullptr, 0, nullptr},
};
PySequenceMethods look_sequence = {length};
PyTypeObject eye_type = {PyVarObject_HEAD_INIT(nullptr, 0)};
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
    notes_type.tp_name = "msprobe_look.Notes";
    notes_type.tp_basicsize = sizeof(Notes);
    notes_type.tp_flags = Py_TPFLAGS_DEFAULT;
    notes_type.tp_new = PyType_GenericNew;
    notes_type.tp_init = (initproc)notes_init;
    notes_type.tp_dealloc = (destructor)notes_free;
    notes_type.tp_methods = notes_methods;
    for (auto* type : {&eye_type, &look_type, &notes_type})
        if (PyType_Ready(type) < 0) return nullptr;
    PyObject* module = PyModule_Create(&definition);
    if (!module) return nullptr;
    Py_INCREF(&eye_type);
    Py_INCREF(&look_type);
    Py_INCREF(&notes_type);
    PyModule_AddObject(module, "Eye", (PyObject*)&eye_type);
    PyModule_AddObject(module, "Look", (PyObject*)&look_type);
    PyModule_AddObject(module, "Notes", (PyObject*)&notes_type);
    return module;
}
