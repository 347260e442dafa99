// The row of a tensor in one call: what `DumpProbe.see` does in Python, for places, shapes and dtypes that are known.
//
// A writer writes on the page of the running step, which the probe turns. What it cannot do itself it hands to Python: a
// tensor that the look does not take, and everything while no page is open.

#pragma once
#include "tensor_cache.h"

#include <stddef.h>

PyObject* THPVariable_Wrap(const at::TensorBase&);  // of libtorch_python, whose headers take ten seconds to read

namespace {

PyTypeObject cache_type = {PyVarObject_HEAD_INIT(nullptr, 0)};
// Far more than a step has rows: with fewer than that, each would be made anew in every step.
constexpr size_t MOST_PLACES = 1 << 18;

struct RowWriter {
    PyObject_HEAD
    vectorcallfunc call;
    TensorCache *look, *weights;  // of the open page; null: none is open
    PyObject* cells;       // of its rows
    PyObject *clock, *describe, *slow, *late, *seq;
};

PyObject* next_number(RowWriter* self) {
    PyObject* now = PyObject_GetAttr(self->clock, self->seq);
    if (!now) return nullptr;
    PyObject* next = PyLong_FromLong(PyLong_AsLong(now) + 1);
    int failed = !next || PyErr_Occurred() || PyObject_SetAttr(self->clock, self->seq, next) < 0;
    Py_XDECREF(next);
    if (failed) Py_CLEAR(now);
    return now;
}

// A tensor of which there may be no Python object yet; it is made when it is asked for.
struct Shown {
    c10::TensorImpl* impl;
    Ref object;
    PyObject* get() {
        if (!object) object = Ref::stolen(THPVariable_Wrap(at::TensorBase(
            c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim_copy(impl))));
        return object.object;
    }
};

// What the rows of a place have in common, as long as shape and strides stay; null where it is to be seen in Python.
Common* common(RowWriter* self, PyObject* place, Shown& x) {
    auto& places = *self->look->context->places;
    auto found = places.find(place);
    if (found != places.end()) {
        auto& one = found->second;
        if (one.type == type_of(x.impl) && x.impl->sizes() == one.sizes &&
            (!one.numbers.plan || x.impl->strides() == one.strides))
            return &one;
    }
    PyObject* shown = x.get();
    Ref told = Ref::stolen(shown ? PyObject_CallFunctionObjArgs(self->describe, place, shown, nullptr) : nullptr);
    if (!told || told.object == Py_None) return nullptr;
    PyObject *layout, *dtype, *extra, *keep;
    long long numbering, cells, plan;
    if (!PyArg_ParseTuple(told.object, "OOOLLLO", &layout, &dtype, &extra, &numbering, &cells, &plan, &keep)) return nullptr;
    if (!self->look) return nullptr;  // Python ran, and the page was closed meanwhile
    if (places.size() >= MOST_PLACES) places.clear();
    Common fresh{place, layout, dtype, extra, keep, {numbering, cells, (const int64_t*)plan}, type_of(x.impl),
                 x.impl->sizes().vec(), x.impl->strides().vec()};
    return &(places[place] = std::move(fresh));
}

// 1: written, or counted as not to be; 0: to be seen in Python; -1: an error is set.
int write_row(RowWriter* self, PyObject* place, Shown& x, bool weight, PyObject* microbatch, PyObject* phase) {
    if (!self->look || !plain(self->look->context, x.impl)) return 0;
    Common* same = common(self, place, x);
    if (!same) return PyErr_Occurred() ? -1 : 0;
    // To make room for a slot runs Python, and that may change what is known of places, or new_page the page.
    Ref layout = same->layout, dtype = same->dtype, extra = same->extra, keep = same->keep, cells = self->cells;
    Numbers numbers = same->numbers;
    Ref seen = (PyObject*)(weight ? self->weights : self->look);
    long slot = slot_of((TensorCache*)seen.object, x.impl, numbers);
    if (slot == NO_ROOM) return 1;  // counted by the table
    if (slot < 0) return PyErr_Occurred() ? -1 : 0;
    Ref number = Ref::stolen(PyLong_FromLong(slot));
    if (!number) return -1;
    if (self->cells != cells.object) {
        Ref done = Ref::stolen(PyObject_CallOneArg(self->late, number.object));
        return done ? 1 : -1;
    }
    Ref seq = Ref::stolen(next_number(self));
    if (!seq) return -1;
    for (PyObject* cell : {seq.object, microbatch, phase, place, layout.object, dtype.object, number.object,
                           extra.object, Py_None})
        if (PyList_Append(cells.object, cell) < 0) return -1;
    return 1;
}

// Takes note of a tensor, by the writer or by Python; -1: an error is set.
int note(RowWriter* self, PyObject* place, Shown& x, bool weight, PyObject* microbatch, PyObject* phase) {
    int done = write_row(self, place, x, weight, microbatch, phase);
    if (done) return done;
    PyObject* shown = x.get();
    if (!shown) return -1;
    Ref answer = Ref::stolen(PyObject_CallFunctionObjArgs(self->slow, place, shown, microbatch, phase, nullptr));
    return answer ? 1 : -1;
}

PyObject* pen_call(PyObject* writer, PyObject* const* args, size_t nargsf, PyObject* names) {
    auto* self = (RowWriter*)writer;
    Py_ssize_t given = PyVectorcall_NARGS(nargsf), named = names ? PyTuple_GET_SIZE(names) : 0;
    // As the sites call it; by keywords, or with something that is no tensor, Python sorts it out.
    if (given == 4 && !named && self->look) {
        MeasureContext* context = self->look->context;
        bool weight = (PyObject*)Py_TYPE(args[1]) == context->parameter;
        if (weight || (PyObject*)Py_TYPE(args[1]) == context->tensor) {
            Quiet quiet;
            Shown x{impl_of(context, args[1]), args[1]};
            if (!x.impl) return nullptr;
            if (note(self, args[0], x, weight, args[2], args[3]) < 0) return nullptr;
            Py_RETURN_NONE;
        }
    }
    return PyObject_Vectorcall(self->slow, args, nargsf, names);
}

// Turns the page: two looks and the list of cells, or nothing to close it.
PyObject* pen_turn(RowWriter* self, PyObject* args) {
    PyObject *look = nullptr, *weights = nullptr, *cells = nullptr;
    if (!PyArg_ParseTuple(args, "|O!O!O!", &cache_type, &look, &cache_type, &weights, &PyList_Type, &cells)) return nullptr;
    if (look && !cells) return PyErr_Format(PyExc_TypeError, "new_page() takes two looks and a list, or nothing");
    Ref before[] = {Ref::stolen((PyObject*)self->look), Ref::stolen((PyObject*)self->weights), Ref::stolen(self->cells)};
    self->look = (TensorCache*)Py_XNewRef(look);
    self->weights = (TensorCache*)Py_XNewRef(weights);
    self->cells = Py_XNewRef(cells);
    Py_RETURN_NONE;
}

int pen_traverse(RowWriter* self, visitproc visit, void* arg) {
    for (PyObject* one : {(PyObject*)self->look, (PyObject*)self->weights, self->cells, self->clock, self->describe,
                          self->slow, self->late})
        Py_VISIT(one);
    return 0;
}

int pen_clear(RowWriter* self) {
    Py_CLEAR(self->look);
    Py_CLEAR(self->weights);
    Py_CLEAR(self->cells);
    Py_CLEAR(self->clock);
    Py_CLEAR(self->describe);
    Py_CLEAR(self->slow);
    Py_CLEAR(self->late);
    return 0;
}

void pen_free(RowWriter* self) {
    PyObject_GC_UnTrack(self);
    pen_clear(self);
    Py_CLEAR(self->seq);
    Py_TYPE(self)->tp_free((PyObject*)self);
}

// The clock; `describe(place, tensor)`: what the rows of a place have in common; `slow`: the same as this writer, in
// Python; `late(slot)`: a thread came too late.
int pen_init(RowWriter* self, PyObject* args, PyObject*) {
    PyObject *clock, *describe, *slow, *late;
    if (!PyArg_ParseTuple(args, "OOOO", &clock, &describe, &slow, &late)) return -1;
    if (!(self->seq = PyUnicode_InternFromString("seq"))) return -1;
    self->call = pen_call;
    self->clock = Py_NewRef(clock);
    self->describe = Py_NewRef(describe);
    self->slow = Py_NewRef(slow);
    self->late = Py_NewRef(late);
    return 0;
}

PyMethodDef pen_methods[] = {
    {"new_page", (PyCFunction)pen_turn, METH_VARARGS, "Write on another page: two looks and its cells, or nothing."},
    {nullptr, nullptr, 0, nullptr},
};
PyTypeObject writer_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

void describe_pen() {
    writer_type.tp_name = "msprobe_hooks.RowWriter";
    writer_type.tp_basicsize = sizeof(RowWriter);
    writer_type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL;
    writer_type.tp_vectorcall_offset = offsetof(RowWriter, call);
    writer_type.tp_call = PyVectorcall_Call;
    writer_type.tp_new = PyType_GenericNew;
    writer_type.tp_init = (initproc)pen_init;
    writer_type.tp_dealloc = (destructor)pen_free;
    writer_type.tp_traverse = (traverseproc)pen_traverse;
    writer_type.tp_clear = (inquiry)pen_clear;
    writer_type.tp_methods = pen_methods;
}

}  // namespace
