// The gradients of an API call: which nodes it made, by which of them the gradients of its inputs go, and the hooks that
// meet them there. The Python version is `links`, `Shares` and `_NodeHook` in sites/calls/api.py.
//
// Nothing is inserted into the graph. A hook is of the autograd engine's own kind: no object of Python for each call that
// the garbage collector visits again and again.

#pragma once
#include "module_hooks.h"

#include <ATen/SequenceNumber.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <typeinfo>

namespace {

using torch::autograd::Node;
using torch::autograd::variable_list;
// A shared or an intrusive pointer, by the release of torch.
typedef std::decay_t<decltype(std::declval<const at::TensorBase&>().grad_fn())> NodeRef;
constexpr size_t MOST_NODES = 256;  // as in sites/calls/api.py

// An input that a gradient may come for, with what it hung on before the call, which may change that.
struct Source {
    Ref path, tensor;
    c10::TensorImpl* impl;
    NodeRef node;
    int64_t slot;
};
typedef c10::SmallVector<Source, 4> Sources;

// A gradient that goes from a node, by its index, and the input that it belongs to.
struct Way {
    Node* node;
    uint32_t index;
    const Source* to;
};
typedef c10::SmallVector<Way, 8> Ways;
typedef c10::SmallVector<Node*, 16> Nodes;

// Walks the nodes that the call made, from its results on: those with numbers from `since` on. The accumulator of a leaf
// has the largest of all and leads nowhere.
Ways find_ways(const Nodes& roots, const Sources& sources, uint64_t since) {
    Ways found;
    // An input that is given twice has the path that is given last.
    c10::SmallVector<std::pair<NodeRef, const Source*>, 4> leaves;
    for (size_t n = sources.size(); n--;)
        if (!sources[n].node)
            leaves.push_back({torch::autograd::impl::try_get_grad_accumulator(tensor_of(sources[n].impl)), &sources[n]});
    Nodes waiting = roots, seen = roots;
    while (!waiting.empty() && seen.size() < MOST_NODES) {
        Node* node = waiting.pop_back_val();
        auto& edges = node->next_edges();
        for (size_t index = 0; index < edges.size(); index++) {
            Node* target = edges[index].function.get();
            if (!target) continue;
            const Source* to = nullptr;
            for (size_t n = sources.size(); n-- && !to;)
                if (sources[n].node.get() == target && sources[n].slot == (int64_t)edges[index].input_nr) to = &sources[n];
            for (size_t n = 0; n < leaves.size() && !to; n++)
                if (leaves[n].first.get() == target) to = leaves[n].second;
            if (to) {
                found.push_back({node, (uint32_t)index, to});
            } else if (target->sequence_nr() != UINT64_MAX && target->sequence_nr() >= since &&
                       std::find(seen.begin(), seen.end(), target) == seen.end()) {
                seen.push_back(target);
                waiting.push_back(target);
            }
        }
    }
    return found;
}

struct Entry;  // of api_calls.h
struct EntryKey {
    PyObject *module, *api;
    long chunk, number;
    bool operator==(const EntryKey& other) const {
        return module == other.module && api == other.api && chunk == other.chunk && number == other.number;
    }
};
struct EntryHash {
    size_t operator()(const EntryKey& key) const {
        uint64_t hash = 0;
        for (uint64_t word : {(uint64_t)key.module, (uint64_t)key.api, (uint64_t)key.chunk, (uint64_t)key.number})
            hash = (hash ^ word ^ (hash >> 29)) * 0x9e3779b97f4a7c15;
        return (size_t)(hash ^ (hash >> 32));
    }
};

enum CallName { STACK, INPUTS, OUTPUTS, INPUT_GRADIENTS, OUTPUT_GRADIENTS, GRAD_FN, ADD, TIME, PARTLY_READ, OUT,
                CALL_NAMES };
const char* const CALL_NAME[] = {"stack",   "inputs", "outputs", "input_gradients", "output_gradients",
                                 "grad_fn", "add",    "backward_moment", "partly_read",    "out"};
enum Helper { CLOCK, FAULT, KNOWN_NAMES, HERE, OUTSIDE, NEW_CALL, UNREAD, FIND, MAY_HOLD, SHARES, HOOK, SLOW, HELPERS };

// What sees the API calls of a site, and what its hooks share.
struct Calls {
    PyObject_HEAD
    vectorcallfunc call;
    char active, traced, inputs, outputs, input_gradients, output_gradients;
    long inside;  // so many recorded calls
    long long round, fired;
    PyObject *see, *helpers[HELPERS], *names[CALL_NAMES], *tensor, *parameter;
    PyObject *paths[MOST_RESULTS], *no_path, *outside, *backward, *about_gradients;
    Holding* holding;
    std::unordered_map<EntryKey, std::unique_ptr<Entry>, EntryHash>* entries;
    MeasureContext context;  // only to find the pointer of a tensor
};

// Runs our own work; what C++ throws is an error of Python like any other.
template <class Work> int safely(Work work) {
    Quiet quiet;
    try {
        return work();
    } catch (const std::exception& error) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, error.what());
    }
    return -1;
}

// The hook of a node for one call. Its last owner may be a thread without the interpreter's lock.
struct Arrived final : torch::autograd::FunctionPostHook {
    struct Cell {
        uint32_t index;
        PyObject *place, *shares;  // null: it comes by one way only
    };
    typedef c10::SmallVector<Cell, 2> Cells;
    Calls* calls;
    PyObject* moment;
    long long round;
    Cells come, go;

    Arrived(Calls* c, PyObject* m) : calls(c), moment(Py_NewRef(m)), round(c->round) { Py_INCREF((PyObject*)c); }
    ~Arrived() override {
        if (!can_lock()) return;
        Locked locked;
        for (auto* cells : {&come, &go})
            for (auto& cell : *cells) {
                Py_DECREF(cell.place);
                Py_XDECREF(cell.shares);
            }
        Py_DECREF(moment);
        Py_DECREF((PyObject*)calls);
    }

    static void add(Cells& to, uint32_t index, PyObject* place, PyObject* shares = nullptr) {
        to.push_back({index, Py_NewRef(place), Py_XNewRef(shares)});
    }

    int see(const at::Tensor& gradient, PyObject* place, PyObject* microbatch) const {
        Ref see = calls->see;
        Shown x{gradient.unsafeGetTensorImpl(), nullptr};
        return see_value(see.object, place, x, microbatch, calls->backward);
    }

    // One share of a gradient; with the last of them the sum is seen.
    int see_share(const at::Tensor* gradient, const Cell& cell, PyObject* microbatch) const {
        Ref given = gradient ? Ref::stolen(THPVariable_Wrap(*gradient)) : Ref(Py_None);
        if (!given) return -1;
        Ref sum = Ref::stolen(PyObject_CallMethodObjArgs(cell.shares, calls->names[ADD], given.object, nullptr));
        if (!sum || sum.object == Py_None) return sum ? 0 : -1;
        Ref see = calls->see;
        Shown x{impl_of(&calls->context, sum.object), sum};
        return x.impl ? see_value(see.object, cell.place, x, microbatch, calls->backward) : -1;
    }

    int tell_all(const variable_list& grad_inputs, const variable_list& grad_outputs) const {
        PyObject* microbatch = PyTuple_GetItem(moment, 0);
        if (!microbatch || PyObject_SetAttr(calls->helpers[CLOCK], calls->names[TIME], moment) < 0) return -1;
        for (auto& cell : come)
            if (cell.index < grad_outputs.size() && grad_outputs[cell.index].defined() &&
                see(grad_outputs[cell.index], cell.place, microbatch) < 0)
                return -1;
        for (auto& cell : go) {
            bool here = cell.index < grad_inputs.size() && grad_inputs[cell.index].defined();
            const at::Tensor* gradient = here ? &grad_inputs[cell.index] : nullptr;
            if (cell.shares ? see_share(gradient, cell, microbatch) < 0
                            : gradient && see(*gradient, cell.place, microbatch) < 0)
                return -1;
        }
        return 0;
    }

    variable_list operator()(const variable_list& grad_inputs, const variable_list& grad_outputs) override {
        if (calls->active && calls->round == round && can_lock()) {
            Locked locked;
            if (safely([&] { return tell_all(grad_inputs, grad_outputs); }) < 0 &&
                tell(calls->helpers[FAULT], calls->about_gradients) < 0)
                stop_the_job();
        }
        return grad_inputs;
    }
};

// All hooks of Python of a node stand in one place of its order. Where there are any, ours joins them: what others add
// later comes behind it, as it would without the compiled one.
bool only_ours(Node* node) {
    for (auto& hook : node->post_hooks())
        if (typeid(*hook) != typeid(Arrived)) return false;
    return true;
}

}  // namespace
