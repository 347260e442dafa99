// Calls of api_calls.h as a type of Python: construction, garbage collection, methods and members.

#pragma once
#include "api_calls.h"

namespace {

int calls_traverse(Calls* self, visitproc visit, void* arg) {
    Py_VISIT(self->see);
    for (PyObject* one : self->helpers) Py_VISIT(one);
    if (self->entries)
        for (auto& one : *self->entries) {
            Py_VISIT(one.second->call.object);
            for (auto* spots : {&one.second->inputs, &one.second->outputs})
                for (auto& spot : *spots)
                    for (PyObject* place : {spot.value.object, spot.gradient.object}) Py_VISIT(place);
        }
    return 0;
}

int calls_clear(Calls* self) {
    self->active = 0;
    Py_CLEAR(self->see);
    for (PyObject*& one : self->helpers) Py_CLEAR(one);
    if (self->entries) {
        auto entries = std::move(*self->entries);
        self->entries->clear();
    }
    return 0;
}

void calls_free(Calls* self) {
    PyObject_GC_UnTrack(self);
    calls_clear(self);
    for (PyObject* one : {self->tensor, self->parameter, self->no_path, self->outside, self->backward,
                          self->about_gradients, self->context.cdata})
        Py_XDECREF(one);
    for (PyObject* name : self->names) Py_XDECREF(name);
    for (PyObject* path : self->paths) Py_XDECREF(path);
    delete self->holding;
    delete self->entries;
    Py_TYPE(self)->tp_free((PyObject*)self);
}

// see; a tuple of the helpers in their order; class of tensors, class of parameters, a tensor; what calls outside of all
// modules are told under; inputs, outputs, and gradients of each.
int calls_init(Calls* self, PyObject* args, PyObject*) {
    PyObject *see, *helpers, *tensor, *parameter, *sample, *outside;
    int inputs, outputs, input_gradients, output_gradients;
    if (!PyArg_ParseTuple(args, "OO!OOOUpppp", &see, &PyTuple_Type, &helpers, &tensor, &parameter, &sample, &outside,
                          &inputs, &outputs, &input_gradients, &output_gradients))
        return -1;
    if (PyTuple_GET_SIZE(helpers) != HELPERS || !PyDict_Check(PyTuple_GET_ITEM(helpers, KNOWN_NAMES)))
        return PyErr_SetString(PyExc_TypeError, "Calls() takes other helpers"), -1;
    for (int n = 0; n < CALL_NAMES; n++)
        if (!(self->names[n] = PyUnicode_InternFromString(CALL_NAME[n]))) return -1;
    for (Py_ssize_t n = 0; n < MOST_RESULTS; n++)
        if (!(self->paths[n] = PyUnicode_FromFormat("%zd", n))) return -1;
    self->call = calls_call;
    self->no_path = PyUnicode_InternFromString("");
    self->backward = PyUnicode_InternFromString("backward");
    self->about_gradients = PyUnicode_InternFromString("gradients of an API call");
    self->context.cdata = PyUnicode_InternFromString("_cdata");
    self->holding = new Holding();
    self->entries = new std::unordered_map<EntryKey, std::unique_ptr<Entry>, EntryHash>();
    for (int n = 0; n < HELPERS; n++) self->helpers[n] = Py_NewRef(PyTuple_GET_ITEM(helpers, n));
    self->see = Py_NewRef(see);
    self->tensor = Py_NewRef(tensor);
    self->parameter = Py_NewRef(parameter);
    self->outside = Py_NewRef(outside);
    self->inputs = inputs;
    self->outputs = outputs;
    self->input_gradients = input_gradients;
    self->output_gradients = output_gradients;
    auto* impl = impl_of(&self->context, sample);
    self->context.direct = impl && *reinterpret_cast<c10::TensorImpl**>(sample + 1) == impl;
    return impl ? 0 : -1;
}

PyObject* calls_known(Calls* self, PyObject*) { return PyLong_FromSize_t(self->entries->size()); }

PyMethodDef calls_methods[] = {
    {"known", (PyCFunction)calls_known, METH_NOARGS, "How many numbered calls have been met so far."},
    {"run", (PyCFunction)calls_run, METH_VARARGS, "Run a call that does not come by the mode, and tell of it."},
    {nullptr, nullptr, 0, nullptr},
};
PyMemberDef calls_members[] = {
    {"active", T_BOOL, offsetof(Calls, active), 0, "Whether calls are told of."},
    {"traced", T_BOOL, offsetof(Calls, traced), 0, "Whether calls are left to Python."},
    {"inside", T_LONG, offsetof(Calls, inside), 0, "How many recorded calls this is inside of."},
    {"round", T_LONGLONG, offsetof(Calls, round), 0, "Number of the recorded step."},
    {"fired", T_LONGLONG, offsetof(Calls, fired), 0, "How many calls were told of."},
    {"see", T_OBJECT_EX, offsetof(Calls, see), 0, "Who is told of a tensor."},
    {nullptr, 0, 0, 0, nullptr},
};

void describe_calls() {
    calls_type.tp_name = "msprobe_hooks.Calls";
    calls_type.tp_basicsize = sizeof(Calls);
    calls_type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL;
    calls_type.tp_vectorcall_offset = offsetof(Calls, call);
    calls_type.tp_call = PyVectorcall_Call;
    calls_type.tp_new = PyType_GenericNew;
    calls_type.tp_init = (initproc)calls_init;
    calls_type.tp_dealloc = (destructor)calls_free;
    calls_type.tp_traverse = (traverseproc)calls_traverse;
    calls_type.tp_clear = (inquiry)calls_clear;
    calls_type.tp_methods = calls_methods;
    calls_type.tp_members = calls_members;
}

}  // namespace
