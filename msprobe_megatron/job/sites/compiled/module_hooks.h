// The hooks of a module and of the gradients of its tensors: what ModuleSite does in Python, for calls that are as usual.
//
// A hook does a call whole or leaves it whole to Python: the first call of a module (whose stack is noted), one inside
// another thread's evaluation, one with tensors in nested arguments, a second call in the same pass. Gradients are met by
// hooks of the autograd engine's own kind, which cost a third of those in Python; tensors that already have hooks of
// Python, and leaves, get one of Python.

#pragma once
#include "row_writer.h"

#define PYBIND11_SIMPLE_GIL_MANAGEMENT
#include <pybind11/pybind11.h>
#include <structmember.h>

namespace torch::autograd {
int get_current_graph_task_id();  // of libtorch_cpu
}

namespace {

PyTypeObject watch_type = {PyVarObject_HEAD_INIT(nullptr, 0)}, hook_type = {PyVarObject_HEAD_INIT(nullptr, 0)};
enum Name { AWAY, RECOMPUTING, MOMENT, BACKWARD_MOMENT, CALLS, CURRENT, BACKWARD_HOOKS, NAMES_USED };
const char* const NAMES[] = {"away", "_recomputing", "moment", "backward_moment", "calls", "current", "_backward_hooks"};
constexpr Py_ssize_t MOST_RESULTS = 16;

// Of types, whether a value of theirs can hold a tensor.
typedef std::unordered_map<PyTypeObject*, std::pair<Ref, bool>> Holding;

// What the hooks of all modules of a site share.
struct Watch {
    PyObject_HEAD
    char active, stacks, inputs, outputs, input_gradients, output_gradients;
    char biases;  // parameters among the results get a row of their value
    char traced;  // the backward is compiled by torch, which knows hooks of Python only
    long long round;  // gradients of an earlier one are ignored
    PyObject *clock, *see, *fault, *gradient_fault, *may_hold, *await, *see_gradient, *tensor, *parameter;
    PyObject *names[NAMES_USED], *forward, *recompute, *backward, *paths[MOST_RESULTS], *no_path;
    Holding* holding;
    MeasureContext context;  // only to find the pointer of a tensor
};

// The two rows that a tensor of a module can have.
struct Rows {
    Ref path, value, gradient;
    bool absent, see_value, see_gradient;
};

struct Hook {
    PyObject_HEAD
    vectorcallfunc call;
    Watch* watch;
    PyObject *watched, *slow, *parameters, *make, *what;
    std::vector<Rows>* known;
    char after, stacked;
};


// Tells `see`, directly if it is a writer; `weight`: the tensor is a parameter.
int see_value(PyObject* see, PyObject* place, Shown& x, PyObject* microbatch, PyObject* phase, bool weight = false) {
    if (Py_TYPE(see) == &writer_type) return note((RowWriter*)see, place, x, weight, microbatch, phase);
    PyObject* shown = x.get();
    if (!shown) return -1;
    Ref done = Ref::stolen(PyObject_CallFunctionObjArgs(see, place, shown, microbatch, phase, nullptr));
    return done ? 1 : -1;
}

// Hands the error that is set to whoever takes faults; -1 if that raises, which it may under `strict`.
int tell(PyObject* taker, PyObject* about) {
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    if (!PyErr_GivenExceptionMatches(error, PyExc_Exception)) return PyErr_Restore(type, error, trace), -1;
    if (trace) PyException_SetTraceback(error, trace);
    Ref kept[] = {Ref::stolen(type), Ref::stolen(error), Ref::stolen(trace)};
    Ref done = Ref::stolen(PyObject_CallFunctionObjArgs(taker, error, about, nullptr));
    return done ? 0 : -1;
}

// The interpreter's lock, for threads of the autograd engine.
struct Locked {
    PyGILState_STATE lock = PyGILState_Ensure();
    ~Locked() { PyGILState_Release(lock); }
};

// Whether its lock can be asked for: while the interpreter ends, threads that do so never come back.
bool can_lock() {
#if PY_VERSION_HEX >= 0x030D0000
    return Py_IsInitialized() && !Py_IsFinalizing();
#else
    return Py_IsInitialized() && !_Py_IsFinalizing();
#endif
}

// The job is to stop, out of the autograd engine: the error that Python has goes on to whoever called backward.
[[noreturn]] void stop_the_job() { throw pybind11::error_already_set(); }

// A gradient that is awaited. Its last owner may be a thread without the interpreter's lock.
struct Awaited {
    Watch* watch;
    PyObject *place, *moment;
    long long round;
    Awaited(Watch* w, PyObject* p, PyObject* m) : watch(w), place(p), moment(m), round(w->round) {
        for (PyObject* one : {(PyObject*)w, p, m}) Py_INCREF(one);
    }
    Awaited(const Awaited&) = delete;
    ~Awaited() {
        if (!can_lock()) return;
        Locked locked;
        for (PyObject* one : {(PyObject*)watch, place, moment}) Py_DECREF(one);
    }
    void arrived(const at::TensorBase& gradient) const {
        if (!watch->active || watch->round != round || !gradient.defined()) return;
        Quiet quiet;
        Shown x{gradient.unsafeGetTensorImpl(), nullptr};
        PyObject* microbatch = PyTuple_GetItem(moment, 0);
        if (microbatch && PyObject_SetAttr(watch->clock, watch->names[BACKWARD_MOMENT], moment) == 0 &&
            see_value(watch->see, place, x, microbatch, watch->backward) >= 0)
            return;
        if (tell(watch->gradient_fault, place) < 0) stop_the_job();
    }
};

int await_gradient(Watch* self, Shown& x, PyObject* place, PyObject* moment) {
    Ref hooks = Ref::stolen(PyObject_GetAttr(x.get(), self->names[BACKWARD_HOOKS]));
    if (!hooks) return -1;
    at::TensorBase tensor(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim_copy(x.impl));
    if (self->traced || hooks.object != Py_None || tensor.is_leaf()) {
        Ref done = Ref::stolen(PyObject_CallFunctionObjArgs(self->await, x.get(), self->see_gradient, place, moment, nullptr));
        return done ? 0 : -1;
    }
    auto awaited = std::make_shared<Awaited>(self, place, moment);
    tensor.register_hook([awaited](const at::TensorBase& gradient) {
        Locked locked;
        awaited->arrived(gradient);
    });
    return 0;
}

// Whether a value of this type can hold a tensor, as `may_hold` says when it is first met; -1: an error is set.
int holds(Holding& known, PyObject* may_hold, PyTypeObject* type) {
    auto found = known.find(type);
    if (found != known.end()) return found->second.second;
    Ref answer = Ref::stolen(PyObject_CallOneArg(may_hold, (PyObject*)type));
    int held = answer ? PyObject_IsTrue(answer.object) : -1;
    if (held >= 0) known.emplace(type, std::make_pair(Ref((PyObject*)type), (bool)held));
    return held;
}

// 1: a tensor; 0: nothing of interest; 2: to be looked into by Python; -1: an error is set.
int kind_of(Watch* self, PyObject* value) {
    PyTypeObject* type = Py_TYPE(value);
    if (value == Py_None || (PyObject*)type == self->parameter) return 0;
    if ((PyObject*)type == self->tensor) return 1;
    int held = holds(*self->holding, self->may_hold, type);
    return held > 0 ? 2 : held;
}

const Rows* rows_of(Hook* self, PyObject* path) {
    for (auto& one : *self->known)
        if (one.path.object == path) return &one;
    for (auto& one : *self->known)
        if (PyUnicode_Compare(one.path.object, path) == 0) return &one;
    Ref made = Ref::stolen(PyObject_CallOneArg(self->make, path));
    PyObject *value, *gradient;
    int absent, see, also;
    if (!made || !PyArg_ParseTuple(made.object, "OOppp", &value, &gradient, &absent, &see, &also)) return nullptr;
    self->known->push_back({path, value, gradient, (bool)absent, (bool)see, (bool)also});
    return &self->known->back();
}

int see_tensor(Hook* self, PyObject* path, PyObject* value, PyObject* phase, PyObject* moment, bool weight = false) {
    Watch* watch = self->watch;
    const Rows* found = rows_of(self, path);
    if (!found) return -1;
    if (found->absent) return 0;
    Rows rows = *found;  // what is called below may add to the vector
    Shown x{impl_of(&watch->context, value), value};
    PyObject* microbatch = PyTuple_GetItem(moment, 0);
    if (!x.impl || !microbatch) return -1;
    bool values = self->after ? watch->outputs : watch->inputs;
    bool gradients = self->after ? watch->output_gradients : watch->input_gradients;
    if (values && rows.see_value && see_value(watch->see, rows.value.object, x, microbatch, phase, weight) < 0)
        return -1;
    if (weight) return 0;  // its gradient is the reduced one
    // Under no_grad (the first pass of a checkpoint) the gradient will come through the recomputed tensor.
    if (gradients && rows.see_gradient && c10::GradMode::is_enabled() && x.impl->requires_grad())
        return await_gradient(watch, x, rows.gradient.object, moment);
    return 0;
}

// Phase and moment of a call that happens now, as Clock.calling says it.
int calling(Watch* self, Ref& phase, Ref& moment) {
    Ref repeating = Ref::stolen(PyObject_GetAttr(self->clock, self->names[RECOMPUTING]));
    int marked = repeating ? PyObject_IsTrue(repeating.object) : -1;
    if (marked < 0) return -1;
    bool engine = !marked && torch::autograd::get_current_graph_task_id() != -1;
    phase = marked || engine ? self->recompute : self->forward;
    moment = Ref::stolen(PyObject_GetAttr(self->clock, self->names[engine ? BACKWARD_MOMENT : MOMENT]));
    return moment ? 0 : -1;
}

// Whether a gradient may come through another tensor: one enters a checkpoint here, or its recomputation.
bool at_checkpoint(Watch* self, PyObject* value) {
    c10::TensorImpl* impl = impl_of(&self->context, value);
    if (!impl || !impl->requires_grad()) return false;
    at::TensorBase tensor(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim_copy(impl));
    return !c10::GradMode::is_enabled() || tensor.is_leaf();
}

// 1: done; 0: for Python; -1: an error is set.
int before(Hook* self, PyObject* args, PyObject* kwargs) {
    Watch* watch = self->watch;
    if (!PyTuple_CheckExact(args) || !PyDict_CheckExact(kwargs)) return 0;
    bool wanted = watch->inputs || watch->input_gradients;
    PyObject *name, *value;
    Py_ssize_t at = 0, positions = PyTuple_GET_SIZE(args);
    if (wanted) {
        for (Py_ssize_t n = 0; n < positions; n++) {
            int kind = kind_of(watch, PyTuple_GET_ITEM(args, n));
            if (kind < 0 || kind == 2) return kind < 0 ? -1 : 0;
            if (kind == 1 && n >= PyTuple_GET_SIZE(self->parameters)) return 0;
            if (kind == 1 && watch->input_gradients && at_checkpoint(watch, PyTuple_GET_ITEM(args, n))) return 0;
        }
        while (PyDict_Next(kwargs, &at, &name, &value)) {
            int kind = kind_of(watch, value);
            if (kind < 0 || kind == 2) return kind < 0 ? -1 : 0;
            if (kind == 1 && watch->input_gradients && at_checkpoint(watch, value)) return 0;
        }
    }
    Ref phase, moment;
    if (calling(watch, phase, moment) < 0) return -1;
    Ref calls = Ref::stolen(PyObject_GetAttr(self->watched, watch->names[CALLS]));
    Ref pass = Ref::stolen(calls ? PyTuple_Pack(2, phase.object, moment.object) : nullptr);
    Ref first = Ref::stolen(pass ? PyLong_FromLong(1) : nullptr), none = Ref::stolen(first ? PyLong_FromLong(0) : nullptr);
    if (!none || !PyDict_CheckExact(calls.object)) return none ? 0 : -1;
    int again = PyDict_Contains(calls.object, pass.object);
    if (again) return again < 0 ? -1 : 0;
    Ref current = Ref::stolen(PyTuple_Pack(3, phase.object, moment.object, none.object));
    if (!current || PyDict_SetItem(calls.object, pass.object, first.object) < 0 ||
        PyObject_SetAttr(self->watched, watch->names[CURRENT], current.object) < 0)
        return -1;
    if (!wanted) return 1;
    Ref held = args, named = kwargs;
    for (Py_ssize_t n = 0; n < positions; n++) {
        value = PyTuple_GET_ITEM(args, n);
        if ((PyObject*)Py_TYPE(value) == watch->tensor &&
            see_tensor(self, PyTuple_GET_ITEM(self->parameters, n), value, phase.object, moment.object) < 0)
            return -1;
    }
    // Torch made this dictionary for the hooks; nobody changes it while it is walked.
    for (at = 0; PyDict_Next(kwargs, &at, &name, &value);)
        if ((PyObject*)Py_TYPE(value) == watch->tensor && see_tensor(self, name, value, phase.object, moment.object) < 0)
            return -1;
    return 1;
}

int after(Hook* self, PyObject* output) {
    Watch* watch = self->watch;
    bool many = PyTuple_CheckExact(output);
    if (many) {
        if (PyTuple_GET_SIZE(output) > MOST_RESULTS) return 0;
        for (Py_ssize_t n = 0; n < PyTuple_GET_SIZE(output); n++) {
            int kind = kind_of(watch, PyTuple_GET_ITEM(output, n));
            if (kind < 0 || kind == 2) return kind < 0 ? -1 : 0;
        }
    } else {
        int kind = kind_of(watch, output);
        if (kind != 1) return kind < 0 ? -1 : kind == 0;
    }
    Ref current = Ref::stolen(PyObject_GetAttr(self->watched, watch->names[CURRENT]));
    PyObject *phase, *moment;
    long call;
    if (!current || !PyArg_ParseTuple(current.object, "OOl", &phase, &moment, &call)) return -1;
    if (call) return 0;
    if (!many) return see_tensor(self, watch->no_path, output, phase, moment) < 0 ? -1 : 1;
    for (Py_ssize_t n = 0; n < PyTuple_GET_SIZE(output); n++) {
        PyObject *value = PyTuple_GET_ITEM(output, n), *type = (PyObject*)Py_TYPE(value);
        bool weight = watch->biases && type == watch->parameter;
        if ((weight || type == watch->tensor) && see_tensor(self, watch->paths[n], value, phase, moment, weight) < 0)
            return -1;
    }
    return 1;
}

PyObject* hook_call(PyObject* hook, PyObject* const* args, size_t nargsf, PyObject* names) {
    auto* self = (Hook*)hook;
    Watch* watch = self->watch;
    Py_ssize_t given = PyVectorcall_NARGS(nargsf);
    // A hook that is taken away while torch walks over the hooks is still called, then without the kwargs.
    if (!watch->active || given < 3) Py_RETURN_NONE;
    int done = 0;
    if (!names && self->stacked) {
        Quiet quiet;
        Ref away = Ref::stolen(PyObject_GetAttr(watch->clock, watch->names[AWAY]));
        if (!away)
            done = -1;
        else if (PyAnySet_Check(away.object) && !PySet_GET_SIZE(away.object))
            done = self->after ? after(self, args[given - 1]) : before(self, args[1], args[2]);
        if (done < 0 && tell(watch->fault, self->what) < 0) return nullptr;
        if (done) Py_RETURN_NONE;
    }
    PyObject* answer = PyObject_Vectorcall(self->slow, args, nargsf, names);
    if (answer) self->stacked = 1;
    return answer;
}

}  // namespace
