// Which tensor is this, has it been measured, and if not, measure it: one call for what takes twenty in Python.
//
// Reads the fields of a tensor and changes none. The Python version is measure/once.py; what is not a plain strided
// tensor of the memory that the slots are in, the host's or a device's, is left to it. The interpreter's lock is held
// throughout.

#pragma once
#include <Python.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/TensorBase.h>
#include <c10/core/GradMode.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <memory_resource>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "device_slots.h"

namespace {

constexpr long NO_ROOM = -2, UNSUPPORTED = -3;
constexpr int MOST_DIMS = 16, MOST_TYPES = 128;
constexpr size_t PRUNE_FROM = 4096;
// Freed storages are looked for with every tensor, among the more the larger it is: to measure it takes longer.
constexpr size_t SWEEP = 4, SWEEP_BYTES = 16 << 10;
typedef void (*Stats)(const void*, int64_t, int64_t, const void*, void*);
typedef void (*Strided)(const void*, int64_t, const int64_t*, const int64_t*, int64_t, const void*, void*);
typedef void (*Measure)(const void*, const int64_t*, void*);

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
    static Ref stolen(PyObject* x) {
        Ref made;
        made.object = x;
        return made;
    }
    explicit operator bool() const { return object; }
};

// While one lives, what is asked of a tensor is not taken for a call of the training code.
struct Quiet {
    at::impl::TorchFunctionDisabledState before = at::impl::PythonTorchFunctionTLS::get_disabled_state();
    Quiet() { at::impl::PythonTorchFunctionTLS::set_disabled_state(at::impl::TorchFunctionDisabledState::ALL_DISABLED); }
    ~Quiet() { at::impl::PythonTorchFunctionTLS::set_disabled_state(before); }
};

// How the elements of a tensor are numbered, for its digest and sketch: by a plan of the kernel, which holds for its
// strides, and on a device by number, with the cells of the sketch (0: digest only). Without cells they are not.
struct Numbers {
    int64_t numbering = 0, cells = -1;
    const int64_t* plan = nullptr;
};

// The cells that the rows of a place have in common, and the shape, strides and dtype for which they hold; `keep` keeps
// the plan alive.
struct Common {
    Ref place, layout, dtype, extra, keep;
    Numbers numbers;
    c10::ScalarType type;
    std::vector<int64_t> sizes, strides;
};

// Numbers of slots, from 0; the slot table counts by it, too.
struct Counter {
    PyObject_HEAD
    long next;
};

// What all pages of a probe share.
struct MeasureContext {
    PyObject_HEAD
    std::unordered_map<PyObject*, Common>* places;
    Counter* counter;
    PyObject *grow, *slots, *tensor, *parameter, *cdata, *keep;  // slots: their addresses, on a device their tensors
    DeviceSlots* device;  // null: in host memory
    Stats stats;
    Strided strided;
    Measure measure;
    bool direct;  // where a tensor's object has its pointer is known
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
// All that tells one tensor from another, in words; the first is the number of its storage.
template <class T> using Pooled = std::pmr::polymorphic_allocator<T>;
typedef std::vector<int64_t, Pooled<int64_t>> Key;
struct KeyHash {
    size_t operator()(const Key& key) const {
        uint64_t hash = 0;
        for (int64_t word : key) {
            hash = (hash ^ (uint64_t)word) * 0x9e3779b97f4a7c15;
            hash ^= hash >> 29;
        }
        return (size_t)hash;
    }
};

struct Memory {
    std::unordered_map<Key, long, KeyHash, std::equal_to<Key>, Pooled<std::pair<const Key, long>>> slots;
    std::unordered_map<c10::StorageImpl*, size_t, std::hash<c10::StorageImpl*>, std::equal_to<c10::StorageImpl*>,
                       Pooled<std::pair<c10::StorageImpl* const, size_t>>>
        places;  // in `held`
    std::vector<Held, Pooled<Held>> held;
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
        for (auto one = slots.begin(); one != slots.end();)
            one = alive.count(one->first[0]) ? std::next(one) : slots.erase(one);
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
struct TensorCache {
    PyObject_HEAD
    MeasureContext* context;
    Memory* memory;
};

// The first word behind the head of the object is the pointer, where that was found to be so for every sample.
c10::TensorImpl* impl_of(const MeasureContext* context, PyObject* x) {
    if (context->direct) return *reinterpret_cast<c10::TensorImpl**>(x + 1);
    PyObject* number = PyObject_GetAttr(x, context->cdata);
    if (!number) return nullptr;
    auto* found = static_cast<c10::TensorImpl*>(PyLong_AsVoidPtr(number));
    Py_DECREF(number);
    return found;
}

c10::ScalarType type_of(const c10::TensorImpl* x) {
    auto type = x->dtype();  // of which older releases ask only what is not constant
    return type.toScalarType();
}

bool plain(const MeasureContext* context, c10::TensorImpl* x) {
    bool here = context->device ? x->device() == context->device->device : x->device_type() == c10::DeviceType::CPU;
    return here && !x->key_set().has_any(ODD) && x->layout() == c10::kStrided &&
           x->has_storage() && !x->is_inference() && x->dim() <= MOST_DIMS;
}

Key key_of(const c10::TensorImpl* x, int64_t storage, int64_t numbering, std::pmr::memory_resource* pool) {
    int64_t words[5 + 2 * MOST_DIMS];
    auto sizes = x->sizes(), strides = x->strides();
    size_t n = 0;
    words[n++] = storage;
    words[n++] = x->storage_offset();
    words[n++] = (int64_t)type_of(x);
    words[n++] = (int64_t)x->version_counter().current_version();
    words[n++] = numbering;
    for (int64_t size : sizes) words[n++] = size;
    for (int64_t stride : strides) words[n++] = stride;
    return Key(words, words + n, pool);
}

// Reads a tensor of host memory, whose type has a code, into the slot at an address.
void read_into(const MeasureContext* context, c10::TensorImpl* impl, void* to, const int64_t* plan) {
    auto type = (size_t)type_of(impl);
    auto* values = (const void*)context->values[type];
    // Looked up now: to make more room runs Python, and with it perhaps another thread.
    auto* begin = static_cast<const char*>(impl->unsafe_storage().unsafeGetStorageImpl()->data());
    begin += impl->storage_offset() * (int64_t)impl->itemsize();
    // Statistics do not depend on the order: what fills its memory is read as it lies.
    if (plan)
        context->measure(begin, plan, to);
    else if (impl->is_non_overlapping_and_dense())
        context->stats(begin, impl->numel(), context->codes[type], values, to);
    else
        context->strided(begin, impl->dim(), impl->sizes().data(), impl->strides().data(), context->codes[type], values, to);
}

// The slot of a tensor: that in which it was measured before, or a new one; below zero no room, or not for us, and -1
// with an error set what Python says.
long slot_of(TensorCache* self, c10::TensorImpl* impl, const Numbers& numbers = {}) {
    MeasureContext* context = self->context;
    try {
        if (!plain(context, impl)) return UNSUPPORTED;
        auto type = (size_t)type_of(impl);
        if (type >= MOST_TYPES || context->codes[type] < 0) return UNSUPPORTED;
        auto* storage = impl->unsafe_storage().unsafeGetStorageImpl();
        if (!storage->data() && impl->numel()) return UNSUPPORTED;
        Memory* memory = self->memory;
        memory->sweep(SWEEP + impl->numel() * impl->itemsize() / SWEEP_BYTES);
        auto key = key_of(impl, memory->number_of(impl), numbers.numbering, context->pool);
        auto known = memory->slots.find(key);
        if (known != memory->slots.end()) return known->second;
        long slot = context->counter->next++;
        if (slot >= PyList_GET_SIZE(context->slots)) {
            Ref grown = Ref::stolen(PyObject_CallFunction(context->grow, "l", slot));
            if (!grown) return -1;
            slot = PyLong_AsLong(grown.object);
            if (slot < 0) return PyErr_Occurred() ? -1 : NO_ROOM;
        }
        Ref place = PyList_GetItem(context->slots, slot);
        if (!place) return -1;
        if (context->device) {
            auto* row = impl_of(context, place.object);
            if (!row) return -1;
            context->device->measure(impl, row, numbers.cells, numbers.numbering);
        } else {
            read_into(context, impl, PyLong_AsVoidPtr(place.object), numbers.plan);
        }
        if (memory->slots.size() >= memory->prune_at) memory->prune();
        memory->slots[std::move(key)] = slot;
        return slot;
    } catch (const std::exception&) {
        return UNSUPPORTED;
    }
}

}  // namespace
