// The compiled look at tensors: which one it is (look_tensors.h), its row (look_rows.h), and the hooks of modules and
// gradients that lead to it (look_hooks.h).
//
// Compiled by build.py against the headers of the torch and the Python that are running, and only used with them.

#include "look_calls.h"

#include <string.h>

namespace {

PyTypeObject counter_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

PyObject* see(Look* self, PyObject* x) {
    Eye* eye = self->eye;
    if ((PyObject*)Py_TYPE(x) != eye->tensor && (PyObject*)Py_TYPE(x) != eye->parameter) return PyLong_FromLong(NOT_MINE);
    auto* impl = impl_of(eye, x);
    if (!impl) return PyErr_Occurred() ? nullptr : PyLong_FromLong(NOT_MINE);
    long slot = slot_of(self, impl);
    return slot == -1 && PyErr_Occurred() ? nullptr : PyLong_FromLong(slot);
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

// The counter, `grow`, addresses of the slots, addresses of msprobe_stats, msprobe_strided and msprobe_measure, class of tensors, class
// of parameters, and for each dtype a tensor of it, its code in kernel.cpp and the address of its table of values; and who
// owns those tables.
int eye_init(Eye* self, PyObject* args, PyObject*) {
    PyObject *counter, *grow, *addresses, *stats, *strided, *measure, *tensor, *parameter, *samples, *keep;
    if (!PyArg_ParseTuple(args, "O!OO!OOOOOO!O", &counter_type, &counter, &grow, &PyList_Type, &addresses, &stats, &strided, &measure, &tensor,
                          &parameter, &PyList_Type, &samples, &keep))
        return -1;
    self->stats = (Stats)PyLong_AsVoidPtr(stats);
    self->strided = (Strided)PyLong_AsVoidPtr(strided);
    self->measure = (Measure)PyLong_AsVoidPtr(measure);
    self->cdata = PyUnicode_InternFromString("_cdata");
    if (!self->stats || !self->strided || !self->measure || !self->cdata) return -1;
    for (PyObject* one : {counter, grow, addresses, tensor, parameter, keep}) Py_INCREF(one);
    self->pool = new std::pmr::unsynchronized_pool_resource();
    self->places = new std::unordered_map<PyObject*, Common>();
    self->counter = (Counter*)counter;
    self->grow = grow;
    self->addresses = addresses;
    self->tensor = tensor;
    self->parameter = parameter;
    self->keep = keep;
    for (int n = 0; n < MOST_TYPES; n++) self->codes[n] = -1;
    bool direct = true;
    for (Py_ssize_t n = 0; n < PyList_Size(samples); n++) {
        PyObject* sample;
        long long code, values;
        if (!PyArg_ParseTuple(PyList_GetItem(samples, n), "OLL", &sample, &code, &values)) return -1;
        auto* impl = impl_of(self, sample);
        if (!impl) return -1;
        auto type = (size_t)type_of(impl);
        if (type < MOST_TYPES) self->codes[type] = code, self->values[type] = values;
        direct = direct && *reinterpret_cast<c10::TensorImpl**>(sample + 1) == impl;
    }
    self->direct = direct && PyList_Size(samples);
    return 0;
}

void eye_free(Eye* self) {
    for (PyObject* one : {(PyObject*)self->counter, self->grow, self->addresses, self->tensor, self->parameter, self->cdata, self->keep})
        Py_XDECREF(one);
    delete self->places;
    delete self->pool;
    Py_TYPE(self)->tp_free((PyObject*)self);
}

PyObject* counter_next(Counter* self) { return PyLong_FromLong(self->next++); }

PyObject* counter_restart(Counter* self, PyObject*) {
    self->next = 0;
    return Py_NewRef((PyObject*)self);
}

PyMethodDef counter_methods[] = {
    {"restart", (PyCFunction)counter_restart, METH_NOARGS, "Count from 0 again; the counter itself."},
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
    counter_type.tp_name = "msprobe_look.Counter";
    counter_type.tp_basicsize = sizeof(Counter);
    counter_type.tp_flags = Py_TPFLAGS_DEFAULT;
    counter_type.tp_new = PyType_GenericNew;
    counter_type.tp_iter = PyObject_SelfIter;
    counter_type.tp_iternext = (iternextfunc)counter_next;
    counter_type.tp_methods = counter_methods;
    describe_pen();
    describe_hooks();
    describe_calls();
    PyObject* module = PyModule_Create(&definition);
    if (!module) return nullptr;
    for (auto* type : {&counter_type, &eye_type, &look_type, &pen_type, &watch_type, &hook_type, &calls_type}) {
        if (PyType_Ready(type) < 0) return nullptr;
        Py_INCREF(type);
        if (PyModule_AddObject(module, strchr(type->tp_name, '.') + 1, (PyObject*)type) < 0) return nullptr;
    }
    return module;
}
