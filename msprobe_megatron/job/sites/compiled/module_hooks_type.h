// Watch and Hook of module_hooks.h as types of Python: construction, garbage collection, members.

#pragma once
#include "module_hooks.h"

namespace {

int hook_traverse(Hook* self, visitproc visit, void* arg) {
    for (PyObject* one : {(PyObject*)self->watch, self->watched, self->slow, self->parameters, self->make, self->what})
        Py_VISIT(one);
    if (self->known)
        for (auto& one : *self->known)
            for (PyObject* ref : {one.value.object, one.gradient.object}) Py_VISIT(ref);
    return 0;
}

int hook_clear(Hook* self) {
    // The watch itself is needed as long as the hook can be called.
    for (PyObject** one : {&self->watched, &self->slow, &self->parameters, &self->make, &self->what}) Py_CLEAR(*one);
    if (self->known) self->known->clear();
    return 0;
}

void hook_free(Hook* self) {
    PyObject_GC_UnTrack(self);
    hook_clear(self);
    Py_CLEAR(self->watch);
    delete self->known;
    Py_TYPE(self)->tp_free((PyObject*)self);
}

// A copy of a module has the hooks of the original, as it has with functions.
PyObject* hook_itself(PyObject* self, PyObject*) { return Py_NewRef(self); }

// What is shared, the module's record, the hook in Python, names of the parameters, `make(path)`, what a fault is said to
// be in, and whether it comes after the forward.
int hook_init(Hook* self, PyObject* args, PyObject*) {
    PyObject *watch, *watched, *slow, *parameters, *make, *what;
    int is_after;
    if (!PyArg_ParseTuple(args, "O!OOO!OUp", &watch_type, &watch, &watched, &slow, &PyTuple_Type, &parameters, &make,
                          &what, &is_after))
        return -1;
    self->call = hook_call;
    self->watch = (Watch*)Py_NewRef(watch);
    self->watched = Py_NewRef(watched);
    self->slow = Py_NewRef(slow);
    self->parameters = Py_NewRef(parameters);
    self->make = Py_NewRef(make);
    self->what = Py_NewRef(what);
    self->known = new std::vector<Rows>();
    self->after = is_after;
    self->stacked = is_after || !self->watch->stacks;
    return 0;
}

int watch_traverse(Watch* self, visitproc visit, void* arg) {
    for (PyObject* one : {self->clock, self->see, self->fault, self->gradient_fault, self->may_hold, self->await,
                          self->see_gradient})
        Py_VISIT(one);
    return 0;
}

int watch_clear(Watch* self) {
    self->active = 0;
    for (PyObject** one : {&self->clock, &self->see, &self->fault, &self->gradient_fault, &self->may_hold, &self->await,
                           &self->see_gradient})
        Py_CLEAR(*one);
    return 0;
}

void watch_free(Watch* self) {
    PyObject_GC_UnTrack(self);
    watch_clear(self);
    for (PyObject* one : {self->tensor, self->parameter, self->forward, self->recompute, self->backward, self->no_path,
                          self->context.cdata})
        Py_XDECREF(one);
    for (PyObject* name : self->names) Py_XDECREF(name);
    for (PyObject* path : self->paths) Py_XDECREF(path);
    delete self->holding;
    Py_TYPE(self)->tp_free((PyObject*)self);
}

// clock, see, fault, gradient_fault, may_hold, await, class of tensors, class of parameters, a tensor; stacks, inputs,
// outputs, gradients of each, and parameters among the outputs.
int watch_init(Watch* self, PyObject* args, PyObject*) {
    PyObject *clock, *see, *fault, *gradient_fault, *may_hold, *await, *tensor, *parameter, *sample;
    int stacks, inputs, outputs, input_gradients, output_gradients, biases;
    if (!PyArg_ParseTuple(args, "OOOOOOOOOpppppp", &clock, &see, &fault, &gradient_fault, &may_hold, &await, &tensor,
                          &parameter, &sample, &stacks, &inputs, &outputs, &input_gradients, &output_gradients,
                          &biases))
        return -1;
    for (int n = 0; n < NAMES_USED; n++)
        if (!(self->names[n] = PyUnicode_InternFromString(NAMES[n]))) return -1;
    for (Py_ssize_t n = 0; n < MOST_RESULTS; n++)
        if (!(self->paths[n] = PyUnicode_FromFormat("%zd", n))) return -1;
    self->forward = PyUnicode_InternFromString("forward");
    self->recompute = PyUnicode_InternFromString("recompute");
    self->backward = PyUnicode_InternFromString("backward");
    self->no_path = PyUnicode_InternFromString("");
    self->context.cdata = PyUnicode_InternFromString("_cdata");
    self->holding = new Holding();
    self->clock = Py_NewRef(clock);
    self->see = Py_NewRef(see);
    self->fault = Py_NewRef(fault);
    self->gradient_fault = Py_NewRef(gradient_fault);
    self->may_hold = Py_NewRef(may_hold);
    self->await = Py_NewRef(await);
    self->see_gradient = Py_NewRef(Py_None);
    self->tensor = Py_NewRef(tensor);
    self->parameter = Py_NewRef(parameter);
    self->stacks = stacks;
    self->inputs = inputs;
    self->outputs = outputs;
    self->input_gradients = input_gradients;
    self->output_gradients = output_gradients;
    self->biases = biases;
    auto* impl = impl_of(&self->context, sample);
    self->context.direct = impl && *reinterpret_cast<c10::TensorImpl**>(sample + 1) == impl;
    return impl ? 0 : -1;
}

PyMethodDef hook_methods[] = {
    {"__copy__", hook_itself, METH_NOARGS, nullptr},
    {"__deepcopy__", hook_itself, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyMemberDef watch_members[] = {
    {"active", T_BOOL, offsetof(Watch, active), 0, "Whether hooks do anything."},
    {"traced", T_BOOL, offsetof(Watch, traced), 0, "Whether gradients are met by hooks of Python."},
    {"round", T_LONGLONG, offsetof(Watch, round), 0, "Number of the recorded step."},
    {"see", T_OBJECT_EX, offsetof(Watch, see), 0, "Who is told of a tensor."},
    {"see_gradient", T_OBJECT_EX, offsetof(Watch, see_gradient), 0, "What hooks of Python call with a gradient."},
    {nullptr, 0, 0, 0, nullptr},
};

void describe_hooks() {
    watch_type.tp_name = "msprobe_hooks.Watch";
    watch_type.tp_basicsize = sizeof(Watch);
    watch_type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC;
    watch_type.tp_new = PyType_GenericNew;
    watch_type.tp_init = (initproc)watch_init;
    watch_type.tp_dealloc = (destructor)watch_free;
    watch_type.tp_traverse = (traverseproc)watch_traverse;
    watch_type.tp_clear = (inquiry)watch_clear;
    watch_type.tp_members = watch_members;
    hook_type.tp_name = "msprobe_hooks.Hook";
    hook_type.tp_basicsize = sizeof(Hook);
    hook_type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL;
    hook_type.tp_vectorcall_offset = offsetof(Hook, call);
    hook_type.tp_call = PyVectorcall_Call;
    hook_type.tp_new = PyType_GenericNew;
    hook_type.tp_init = (initproc)hook_init;
    hook_type.tp_dealloc = (destructor)hook_free;
    hook_type.tp_traverse = (traverseproc)hook_traverse;
    hook_type.tp_clear = (inquiry)hook_clear;
    hook_type.tp_methods = hook_methods;
}

}  // namespace
