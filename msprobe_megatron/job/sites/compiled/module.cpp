// The compiled look at tensors: which one it is (tensor_cache.h), its row (row_writer.h), and the hooks of modules and
// gradients that lead to it (module_hooks.h).
//
// Compiled by build.py against the headers of the torch and the Python that are running, and only used with them.

#include "api_calls_type.h"
#include "module_hooks_type.h"

#include <string.h>

namespace {

PyTypeObject counter_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

PyObject* see(TensorCache* self, PyObject* x) {
    MeasureContext* context = self->context;
    if ((PyObject*)Py_TYPE(x) != context->tensor && (PyObject*)Py_TYPE(x) != context->parameter) return PyLong_FromLong(UNSUPPORTED);
    auto* impl = impl_of(context, x);
    if (!impl) return PyErr_Occurred() ? nullptr : PyLong_FromLong(UNSUPPORTED);
    long slot = slot_of(self, impl);
    return slot == -1 && PyErr_Occurred() ? nullptr : PyLong_FromLong(slot);
}

PyObject* forget(TensorCache* self, PyObject*) {
    self->memory->clear();
    Py_RETURN_NONE;
}

PyObject* storages(TensorCache* self, PyObject*) { return PyLong_FromSize_t(self->memory->held.size()); }

Py_ssize_t length(PyObject* self) { return (Py_ssize_t)((TensorCache*)self)->memory->slots.size(); }

int look_init(TensorCache* self, PyObject* args, PyObject*) {
    PyObject* context;
    if (!PyArg_ParseTuple(args, "O", &context)) return -1;
    Py_INCREF(context);
    self->context = (MeasureContext*)context;
    self->memory = new Memory(self->context->pool);
    return 0;
}

void look_free(TensorCache* self) {
    delete self->memory;
    Py_XDECREF((PyObject*)self->context);
    Py_TYPE(self)->tp_free((PyObject*)self);
}

// The counter, `grow`, the slots (addresses in host memory, else tensors), addresses of msprobe_stats, msprobe_strided and
// msprobe_measure, class of tensors, class of parameters, for each dtype a tensor of it, its code in the kernel and the
// address of its table of values, and who owns those tables; for a device a tensor of it, and whether floats of the slots
// are float64.
int eye_init(MeasureContext* self, PyObject* args, PyObject*) {
    PyObject *counter, *grow, *slots, *stats, *strided, *measure, *tensor, *parameter, *samples, *keep;
    PyObject* there = nullptr;
    int wide = 0;
    if (!PyArg_ParseTuple(args, "O!OO!OOOOOO!O|Op", &counter_type, &counter, &grow, &PyList_Type, &slots, &stats, &strided,
                          &measure, &tensor, &parameter, &PyList_Type, &samples, &keep, &there, &wide))
        return -1;
    self->stats = (Stats)PyLong_AsVoidPtr(stats);
    self->strided = (Strided)PyLong_AsVoidPtr(strided);
    self->measure = (Measure)PyLong_AsVoidPtr(measure);
    self->cdata = PyUnicode_InternFromString("_cdata");
    if (!self->stats || !self->strided || !self->measure || !self->cdata) return -1;
    for (PyObject* one : {counter, grow, slots, tensor, parameter, keep}) Py_INCREF(one);
    self->pool = new std::pmr::unsynchronized_pool_resource();
    self->places = new std::unordered_map<PyObject*, Common>();
    self->counter = (Counter*)counter;
    self->grow = grow;
    self->slots = slots;
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
    if (!there) return 0;
    auto* on = impl_of(self, there);
    if (!on) return -1;
    try {
        self->device = new DeviceSlots(on->device(), wide);
    } catch (const std::exception& error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
        return -1;
    }
    return 0;
}

void eye_free(MeasureContext* self) {
    for (PyObject* one : {(PyObject*)self->counter, self->grow, self->slots, self->tensor, self->parameter, self->cdata, self->keep})
        Py_XDECREF(one);
    delete self->device;
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
PyTypeObject context_type = {PyVarObject_HEAD_INIT(nullptr, 0)};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "msprobe_hooks", nullptr, -1, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_msprobe_hooks(void) {
    context_type.tp_name = "msprobe_hooks.MeasureContext";
    context_type.tp_basicsize = sizeof(MeasureContext);
    context_type.tp_flags = Py_TPFLAGS_DEFAULT;
    context_type.tp_new = PyType_GenericNew;
    context_type.tp_init = (initproc)eye_init;
    context_type.tp_dealloc = (destructor)eye_free;
    cache_type.tp_name = "msprobe_hooks.TensorCache";
    cache_type.tp_basicsize = sizeof(TensorCache);
    cache_type.tp_flags = Py_TPFLAGS_DEFAULT;
    cache_type.tp_new = PyType_GenericNew;
    cache_type.tp_init = (initproc)look_init;
    cache_type.tp_dealloc = (destructor)look_free;
    cache_type.tp_methods = look_methods;
    cache_type.tp_as_sequence = &look_sequence;
    counter_type.tp_name = "msprobe_hooks.Counter";
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
    for (auto* type : {&counter_type, &context_type, &cache_type, &writer_type, &watch_type, &hook_type, &calls_type}) {
        if (PyType_Ready(type) < 0) return nullptr;
        Py_INCREF(type);
        if (PyModule_AddObject(module, strchr(type->tp_name, '.') + 1, (PyObject*)type) < 0) return nullptr;
    }
    return module;
}
