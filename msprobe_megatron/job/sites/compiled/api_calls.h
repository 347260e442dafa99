// The API calls: what the mode of ApiSite does in Python with a call of torch, its arguments and its results.
//
// Most calls are only passed on, by nothing but a look-up of their name. One that is watched is done whole here; Python is
// asked for what is new (the name of a function, the places of a call) and for containers to be looked into. Where torch
// compiles the backward, which then takes no hooks but those of Python, every call is left to Python whole.

#pragma once
#include "autograd_nodes.h"

namespace {

PyTypeObject calls_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

// A tensor of a call: its path and itself.
struct Item {
    Ref path, tensor;
};
typedef c10::SmallVector<Item, 6> Items;

// The two places that a tensor of a call can have, made when they are first asked for.
struct Spot {
    Ref path, value, gradient;
};

// One numbered call of a module. What it is found by is kept alive, so that its addresses stay its own.
struct Entry {
    Ref module, api, call;  // None: not wanted
    std::vector<Spot> inputs, outputs;
    bool partly_read = false;
};

// Where a tensor of a call is told of; `kind`: INPUTS, OUTPUTS or the gradients of either.
Ref place_of(Calls* self, Entry& entry, CallName kind, PyObject* path) {
    auto& spots = kind == INPUTS || kind == INPUT_GRADIENTS ? entry.inputs : entry.outputs;
    auto cell = kind == INPUTS || kind == OUTPUTS ? &Spot::value : &Spot::gradient;
    for (auto& spot : spots)
        if (spot.path.object == path && spot.*cell) return spot.*cell;
    Ref places = Ref::stolen(PyObject_GetAttr(entry.call.object, self->names[kind]));
    Ref place = Ref::stolen(places ? PyObject_GetItem(places.object, path) : nullptr);
    if (!place) return place;
    for (auto& spot : spots)
        if (spot.path.object == path) return spot.*cell = place, place;
    // Paths inside of containers are made anew with every call: those are asked for again.
    if (spots.size() < MOST_RESULTS) {
        spots.push_back({path});
        spots.back().*cell = place;
    }
    return place;
}

int see_items(Calls* self, Entry& entry, CallName kind, const Items& items, PyObject* moment, PyObject* phase) {
    PyObject* microbatch = PyTuple_GetItem(moment, 0);
    if (!microbatch) return -1;
    for (auto& item : items) {
        Ref place = place_of(self, entry, kind, item.path.object), see = self->see;
        if (!place) return -1;
        PyObject* type = (PyObject*)Py_TYPE(item.tensor.object);
        Shown x{impl_of(&self->context, item.tensor.object), item.tensor};
        if (!x.impl) return -1;
        if (type == self->tensor || type == self->parameter) {
            if (see_value(see.object, place.object, x, microbatch, phase, type == self->parameter) < 0) return -1;
        } else {
            Ref done = Ref::stolen(PyObject_CallFunctionObjArgs(see.object, place.object, x.get(), microbatch, phase, nullptr));
            if (!done) return -1;
        }
    }
    return 0;
}

// Adds the tensors of a value that is no tensor itself; to look into one is left to Python.
int find_inside(Calls* self, PyObject* value, PyObject* path, PyObject* parameters, Items& found) {
    int held = holds(*self->holding, self->helpers[MAY_HOLD], Py_TYPE(value));
    if (held <= 0) return held;
    Ref list = Ref::stolen(PyList_New(0)), depth = Ref::stolen(PyLong_FromLong(0));
    Ref done = Ref::stolen(list && depth ? PyObject_CallFunctionObjArgs(self->helpers[FIND], value, path, list.object,
                                                                        depth.object, parameters, nullptr)
                                         : nullptr);
    if (!done) return -1;
    for (Py_ssize_t n = 0; n < PyList_GET_SIZE(list.object); n++) {
        PyObject *name, *tensor;
        if (!PyArg_ParseTuple(PyList_GET_ITEM(list.object, n), "OO", &name, &tensor)) return -1;
        found.push_back({name, tensor});
    }
    return 0;
}

int find_argument(Calls* self, PyObject* value, PyObject* path, Items& found) {
    PyObject* type = (PyObject*)Py_TYPE(value);
    if (type != self->tensor && type != self->parameter)
        return value == Py_None ? 0 : find_inside(self, value, path, Py_True, found);
    found.push_back({path, value});
    return 0;
}

int find_arguments(Calls* self, PyObject* args, PyObject* kwargs, Items& found) {
    for (Py_ssize_t n = 0; n < PyTuple_GET_SIZE(args); n++) {
        Ref path = n < MOST_RESULTS ? Ref(self->paths[n]) : Ref::stolen(PyUnicode_FromFormat("%zd", n));
        if (!path || find_argument(self, PyTuple_GET_ITEM(args, n), path.object, found) < 0) return -1;
    }
    PyObject *name, *value;
    for (Py_ssize_t at = 0; kwargs && PyDict_Next(kwargs, &at, &name, &value);) {
        Ref path = name, held = value;
        if (find_argument(self, value, name, found) < 0) return -1;
    }
    return 0;
}

// Whether the call comes from a file that handles states of generators, as in arguments.py.
bool called_by_keeper() {
    Ref frame = (PyObject*)PyEval_GetFrame();
    for (int n = 0; frame && n < 8; n++) {
        auto* at = (PyFrameObject*)frame.object;
        Ref code = Ref::stolen((PyObject*)PyFrame_GetCode(at));
        const char* name = PyUnicode_AsUTF8(((PyCodeObject*)code.object)->co_filename);
        if (!name) return PyErr_Clear(), false;
        std::string file(name);
        auto ends = [&](const char* end) {
            std::string tail(end);
            return file.size() >= tail.size() && !file.compare(file.size() - tail.size(), tail.size(), tail);
        };
        if (!ends("torch/_tensor.py") && !ends("torch/overrides.py") && !ends("/job/sites/calls/api.py"))
            return ends("/random.py");
        frame = Ref::stolen((PyObject*)PyFrame_GetBack(at));
    }
    return false;
}

// A state of a generator, or a comparison of two: bookkeeping of the host, as in arguments.py.
bool is_generator_state(const c10::TensorImpl* impl) {
    auto type = impl->dtype().toScalarType();
    if ((type != c10::kByte && type != c10::kBool) || !impl->is_cpu() || impl->layout() != c10::kStrided) return false;
    if (impl->dim() > 1) return false;
    return (impl->dim() == 1 && impl->numel() == 5056) || called_by_keeper();
}

int find_results(Calls* self, PyObject* result, Items& found) {
    PyObject* type = (PyObject*)Py_TYPE(result);
    if (type == self->tensor) return found.push_back({self->no_path, result}), 0;
    if (result == Py_None || type == self->parameter) return 0;
    if (PyTuple_CheckExact(result) && PyTuple_GET_SIZE(result) <= MOST_RESULTS) {
        bool flat = true;
        for (Py_ssize_t n = 0; n < PyTuple_GET_SIZE(result) && flat; n++) {
            PyObject* one = PyTuple_GET_ITEM(result, n);
            flat = one == Py_None || (PyObject*)Py_TYPE(one) == self->tensor;
        }
        for (Py_ssize_t n = 0; n < PyTuple_GET_SIZE(result) && flat; n++)
            if (PyTuple_GET_ITEM(result, n) != Py_None) found.push_back({self->paths[n], PyTuple_GET_ITEM(result, n)});
        if (flat) return 0;
    }
    return find_inside(self, result, self->no_path, Py_False, found);
}

// Null with an error set, or what is known of a numbered call. It stays where it is as long as `self` lives.
Entry* entry_of(Calls* self, PyObject* module, PyObject* chunk, PyObject* api, long number) {
    EntryKey key{module, api, PyLong_AsLong(chunk), number};
    auto found = self->entries->find(key);
    if (found != self->entries->end()) return found->second.get();
    Ref call = Ref::stolen(PyObject_CallFunction(self->helpers[NEW_CALL], "OOOl", module, chunk, api, number));
    if (!call) return nullptr;
    int partly_read = 0;
    if (call.object != Py_None) {
        Ref flag = Ref::stolen(PyObject_GetAttr(call.object, self->names[PARTLY_READ]));
        if (!flag || (partly_read = PyObject_IsTrue(flag.object)) < 0) return nullptr;
    }
    auto& entry = (*self->entries)[key];  // Python ran, perhaps in another thread for the same call
    if (!entry) entry = std::unique_ptr<Entry>(new Entry{module, api, call, {}, {}, partly_read > 0});
    return entry.get();
}

// Drops the arguments that the call does not read: their values mean nothing.
int drop_unread(Calls* self, Entry& entry, PyObject* args, PyObject* kwargs, Items& found) {
    Ref unread = Ref::stolen(PyObject_CallFunctionObjArgs(self->helpers[UNREAD], entry.call.object, args,
                                                          kwargs ? kwargs : Py_None, nullptr));
    if (!unread || !PyTuple_Check(unread.object)) return unread ? (PyErr_BadInternalCall(), -1) : -1;
    for (Py_ssize_t n = 0; n < PyTuple_GET_SIZE(unread.object); n++) {
        const char* path = PyUnicode_AsUTF8(PyTuple_GET_ITEM(unread.object, n));
        if (!path) return -1;
        std::string whole(path), inside = whole + ".";
        Items kept;
        for (auto& item : found) {
            const char* own = PyUnicode_AsUTF8(item.path.object);
            if (!own) return -1;
            if (whole != own && std::string(own).compare(0, inside.size(), inside)) kept.push_back(item);
        }
        found = std::move(kept);
    }
    return 0;
}

// What is kept of a call while it runs.
struct Pending {
    Entry* entry = nullptr;
    Ref running;
    Sources sources;
    uint64_t since = 0;
};

// 1: there is something to do after the call; 0: nothing; -1: an error is set.
int before(Calls* self, PyObject* api, PyObject* args, PyObject* kwargs, Pending& pending) {
    Items found;
    if (find_arguments(self, args, kwargs, found) < 0) return -1;
    if (found.empty()) return 0;
    for (auto& item : found) {
        auto* impl = impl_of(&self->context, item.tensor.object);
        if (!impl) return -1;
        if (is_generator_state(impl)) return 0;
    }
    Ref stack = Ref::stolen(PyObject_GetAttr(self->helpers[HERE], self->names[STACK]));
    if (!stack || !PyList_Check(stack.object)) return stack ? (PyErr_BadInternalCall(), -1) : -1;
    Py_ssize_t height = PyList_GET_SIZE(stack.object);
    Ref running = height ? Ref(PyList_GET_ITEM(stack.object, height - 1))
                         : Ref::stolen(PyObject_CallOneArg(self->helpers[OUTSIDE], self->outside));
    if (!running || running.object == Py_None) return running ? 0 : -1;
    PyObject *module, *chunk, *phase, *moment, *counts;
    if (!PyArg_ParseTuple(running.object, "OOOOO!", &module, &chunk, &phase, &moment, &PyDict_Type, &counts)) return -1;
    PyObject* count = PyDict_GetItemWithError(counts, api);
    if (!count && PyErr_Occurred()) return -1;
    long number = count ? PyLong_AsLong(count) : 0;
    Ref next = Ref::stolen(PyLong_FromLong(number + 1));
    if (!next || PyDict_SetItem(counts, api, next.object) < 0) return -1;
    Entry* entry = entry_of(self, module, chunk, api, number);
    if (!entry || entry->call.object == Py_None) return entry ? 0 : -1;
    if ((entry->partly_read || (kwargs && PyDict_GetItemWithError(kwargs, self->names[OUT]))) &&
        drop_unread(self, *entry, args, kwargs, found) < 0)
        return -1;
    if (self->inputs && see_items(self, *entry, INPUTS, found, moment, phase) < 0) return -1;
    // Before the call: in place, it moves what it changes to a node of its own.
    if (self->input_gradients && c10::GradMode::is_enabled())
        for (auto& item : found) {
            auto* impl = impl_of(&self->context, item.tensor.object);
            if (!impl) return -1;
            if (!impl->requires_grad()) continue;
            auto tensor = tensor_of(impl);
            pending.sources.push_back({item.path, item.tensor, impl, tensor.grad_fn(), tensor.output_nr()});
        }
    pending.entry = entry;
    pending.running = running;
    pending.since = at::sequence_number::peek();
    return 1;
}

// A node of the results, with one of them and the gradients of all that come to it.
struct Given {
    NodeRef node;
    PyObject* tensor;
    c10::SmallVector<std::pair<uint32_t, Ref>, 2> here;
};

// A hook of Python, where others of Python are.
int hook_in_python(Calls* self, PyObject* tensor, const Arrived& arrived) {
    Ref node = Ref::stolen(PyObject_GetAttr(tensor, self->names[GRAD_FN])), cells = Ref::stolen(PyList_New(0));
    if (!node || !cells) return -1;
    auto add = [&](Ref cell) { return cell ? PyList_Append(cells.object, cell.object) : -1; };
    if (add(arrived.moment) < 0 || add(Ref::stolen(PyLong_FromSize_t(2 * arrived.come.size()))) < 0) return -1;
    for (auto& cell : arrived.come)
        if (add(Ref::stolen(PyLong_FromLong(cell.index))) < 0 || add(cell.place) < 0) return -1;
    for (auto& cell : arrived.go)
        if (add(Ref::stolen(PyLong_FromLong(cell.index))) < 0 || add(cell.place) < 0 ||
            add(cell.shares ? cell.shares : Py_None) < 0)
            return -1;
    Ref done = Ref::stolen(PyObject_CallFunctionObjArgs(self->helpers[HOOK], node.object, cells.object, nullptr));
    return done ? 0 : -1;
}

int watch_gradients(Calls* self, Entry& entry, PyObject* moment, const Pending& pending, const Items& outputs) {
    c10::SmallVector<Given, 2> given;
    for (auto& item : outputs) {
        auto* impl = impl_of(&self->context, item.tensor.object);
        if (!impl) return -1;
        auto tensor = tensor_of(impl);
        NodeRef node = tensor.grad_fn();
        if (!node) continue;
        auto at = std::find_if(given.begin(), given.end(), [&](const Given& one) { return one.node == node; });
        if (at == given.end()) {
            given.push_back({node, item.tensor.object});
            at = given.end() - 1;
        }
        if (!self->output_gradients) continue;
        Ref place = place_of(self, entry, OUTPUT_GRADIENTS, item.path.object);
        if (!place) return -1;
        at->here.push_back({(uint32_t)tensor.output_nr(), place});
    }
    if (given.empty()) return 0;
    Nodes nodes;
    for (auto& one : given) nodes.push_back(one.node.get());
    Ways ways;
    if (!pending.sources.empty()) ways = find_ways(nodes, pending.sources, pending.since);
    // Of the inputs whose gradients come by several ways.
    c10::SmallVector<Ref, 8> shares(ways.size());
    for (size_t n = 0; n < ways.size(); n++) {
        size_t count = 0, first = ways.size();
        for (size_t other = 0; other < ways.size(); other++)
            if (ways[other].to == ways[n].to) count++, first = std::min(first, other);
        if (count > 1)
            shares[n] = first < n ? shares[first] : Ref::stolen(PyObject_CallFunction(self->helpers[SHARES], "n", count));
        if (count > 1 && !shares[n]) return -1;
        if (std::find(nodes.begin(), nodes.end(), ways[n].node) == nodes.end()) nodes.push_back(ways[n].node);
    }
    for (size_t n = 0; n < nodes.size(); n++) {
        std::unique_ptr<Arrived> arrived(new Arrived(self, moment));
        if (n < given.size())
            for (auto& one : given[n].here) Arrived::add(arrived->come, one.first, one.second.object);
        for (size_t way = 0; way < ways.size(); way++) {
            if (ways[way].node != nodes[n]) continue;
            Ref place = place_of(self, entry, INPUT_GRADIENTS, ways[way].to->path.object);
            if (!place) return -1;
            Arrived::add(arrived->go, ways[way].index, place.object, shares[way].object);
        }
        if (arrived->come.empty() && arrived->go.empty()) continue;
        if (n < given.size() && !only_ours(nodes[n])) {
            if (hook_in_python(self, given[n].tensor, *arrived) < 0) return -1;
        } else {
            nodes[n]->add_post_hook(std::move(arrived));
        }
    }
    return 0;
}

int after(Calls* self, PyObject* result, const Pending& pending) {
    Items outputs;
    if (find_results(self, result, outputs) < 0) return -1;
    self->fired++;
    PyObject *phase = PyTuple_GET_ITEM(pending.running.object, 2), *moment = PyTuple_GET_ITEM(pending.running.object, 3);
    if (self->outputs && see_items(self, *pending.entry, OUTPUTS, outputs, moment, phase) < 0) return -1;
    // Under no_grad (the first pass of a checkpoint) no result has a node: its gradients come when it is repeated.
    return watch_gradients(self, *pending.entry, moment, pending, outputs);
}

int tell_of_call(Calls* self, const char* where, PyObject* api) {
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    Ref about = Ref::stolen(PyUnicode_FromFormat(where, api));
    PyErr_Restore(type, error, trace);
    return tell(self->helpers[FAULT], about ? about.object : api);
}

PyObject* run(Calls* self, PyObject* api, PyObject* function, PyObject* args, PyObject* kwargs, long inside) {
    Pending pending;
    int ready = safely([&] { return before(self, api, args, kwargs, pending); });
    if (ready < 0 && tell_of_call(self, "input of %U", api) < 0) return nullptr;
    self->inside += inside;
    Ref result = Ref::stolen(PyObject_Call(function, args, kwargs));
    self->inside -= inside;
    if (!result) return nullptr;
    if (ready > 0 && self->active && safely([&] { return after(self, result.object, pending); }) < 0 &&
        tell_of_call(self, "output of %U", api) < 0)
        return nullptr;
    return Py_NewRef(result.object);
}

// As a mode's `__torch_function__`: the mode, the function, types, args and perhaps kwargs.
PyObject* calls_call(PyObject* calls, PyObject* const* given, size_t nargsf, PyObject* named) {
    auto* self = (Calls*)calls;
    Py_ssize_t count = PyVectorcall_NARGS(nargsf);
    PyObject* names = self->helpers[KNOWN_NAMES];
    if (!names) return PyErr_Format(PyExc_RuntimeError, "msprobe: a site that is gone sees no calls");
    if (named || count < 4 || count > 5 || !PyTuple_CheckExact(given[3]))
        return PyObject_Vectorcall(self->helpers[SLOW], given, nargsf, named);
    PyObject *function = given[1], *args = given[3], *kwargs = count > 4 && given[4] != Py_None ? given[4] : nullptr;
    if (kwargs && !PyDict_Check(kwargs)) return PyObject_Vectorcall(self->helpers[SLOW], given, nargsf, named);
    Ref name = PyDict_GetItemWithError(names, function);
    if (!name && PyErr_Occurred()) return nullptr;
    if (!name) name = Ref::stolen(PyObject_GetItem(names, function));  // asks Python, once a function
    if (!name) return nullptr;
    if (name.object == Py_None || self->inside || !self->active) return PyObject_Call(function, args, kwargs);
    if (self->traced) return PyObject_Vectorcall(self->helpers[SLOW], given, nargsf, named);
    return run(self, name.object, function, args, kwargs, 1);
}

// run(api, function, args, kwargs, inside): a call that does not come by the mode.
PyObject* calls_run(Calls* self, PyObject* given) {
    PyObject *api, *function, *args, *kwargs;
    long inside;
    if (!PyArg_ParseTuple(given, "UOO!O!l", &api, &function, &PyTuple_Type, &args, &PyDict_Type, &kwargs, &inside))
        return nullptr;
    // Calls are known by the address of their name, and this one may have been made for this call alone.
    Py_INCREF(api);
    PyUnicode_InternInPlace(&api);
    Ref name = Ref::stolen(api);
    return run(self, api, function, args, kwargs, inside);
}

}  // namespace
