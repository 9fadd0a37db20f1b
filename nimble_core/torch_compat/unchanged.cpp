// The passes of unchanged.py, without a Python object for each thing looked at. Those over parameters and modules run no
// Python code on the way; those over inputs run modes that the caller has entered, and what they are given to ask.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#ifdef Py_GIL_DISABLED
#error "other threads could change what these read"
#endif

static void *(*data_of)(PyObject *);  // torch's own, which code that Inductor generates calls
static PyGetSetDef *version;          // of Tensor._version
static PyGetSetDef *layout, *shape, *dtype, *device, *requires_grad;
static PyObject *dense, *plain, *parameter;
static PyObject *is_contiguous, *stride, *is_neg;  // methods of Tensor
static PyObject *is_grad_enabled;
static const int DEPTH = 8;
static void *const NOWHERE = reinterpret_cast<void *>(1);  // as in unchanged.py

// 1 if what was found is what is wanted, 0 if not, -1 if it is an error. Takes over the reference.
static int equal(PyObject *found, PyObject *wanted) {
    int same = !found ? -1 : found == wanted ? 1 : PyObject_RichCompareBool(found, wanted, Py_EQ);
    Py_XDECREF(found);
    return same;
}

// Whether containers hold the same objects. False is not certain: equal objects count as different, keys have an order.
static bool same(PyObject *now, PyObject *before, int depth) {
    if (now == before) return true;
    if (depth == 0) return false;
    if (PyDict_Check(now) && PyDict_Check(before)) {
        if (PyDict_GET_SIZE(now) != PyDict_GET_SIZE(before)) return false;
        PyObject *key, *value, *known, *was;
        for (Py_ssize_t i = 0, j = 0; PyDict_Next(now, &i, &key, &value) && PyDict_Next(before, &j, &known, &was);)
            if (key != known || !same(value, was, depth - 1)) return false;
        return true;
    }
    if ((PyList_CheckExact(now) && PyList_CheckExact(before)) || (PyTuple_CheckExact(now) && PyTuple_CheckExact(before))) {
        Py_ssize_t size = PySequence_Fast_GET_SIZE(now);
        if (size != PySequence_Fast_GET_SIZE(before)) return false;
        for (Py_ssize_t i = 0; i < size; i++)
            if (!same(PySequence_Fast_GET_ITEM(now, i), PySequence_Fast_GET_ITEM(before, i), depth - 1)) return false;
        return true;
    }
    // Bound anew each time that they are asked for.
    return PyMethod_Check(now) && PyMethod_Check(before) && PyMethod_GET_SELF(now) == PyMethod_GET_SELF(before) &&
           PyMethod_GET_FUNCTION(now) == PyMethod_GET_FUNCTION(before);
}

static PyObject *same_objects(PyObject *, PyObject *const *args, Py_ssize_t) {
    return PyBool_FromLong(same(args[0], args[1], DEPTH));
}

static PyObject *same_state(PyObject *, PyObject *const *args, Py_ssize_t) {
    PyObject *owners = args[0], *names = args[1], *roots = args[2], *before = args[3];
    Py_ssize_t size = PyList_GET_SIZE(owners), more = PyList_GET_SIZE(roots);
    if (PyList_GET_SIZE(names) != size || PyList_GET_SIZE(before) != size + more) Py_RETURN_FALSE;
    for (Py_ssize_t i = 0; i < size; i++) {
        PyObject *owner = PyList_GET_ITEM(owners, i);
        PyObject *now = PyDict_Check(owner) ? PyDict_GetItemWithError(owner, PyList_GET_ITEM(names, i)) : nullptr;
        if (!now && PyErr_Occurred()) return nullptr;
        if (!now || !same(now, PyList_GET_ITEM(before, i), DEPTH)) Py_RETURN_FALSE;
    }
    bool found = true;
    for (Py_ssize_t i = 0; found && i < more; i++) {
        PyObject *now = PyObject_GetAttrString(PyList_GET_ITEM(roots, i), "forward");
        if (!now && !PyErr_ExceptionMatches(PyExc_AttributeError)) return nullptr;
        if (!now) PyErr_Clear();
        found = now && same(now, PyList_GET_ITEM(before, size + i), DEPTH);
        Py_XDECREF(now);
    }
    return PyBool_FromLong(found);
}

static PyObject *same_memory(PyObject *, PyObject *const *args, Py_ssize_t) {
    PyObject *tensors = args[0], *addresses = args[1];
    try {
        for (Py_ssize_t i = 0, size = PyList_GET_SIZE(tensors); i < size; i++)
            if (data_of(PyList_GET_ITEM(tensors, i)) != PyLong_AsVoidPtr(PyList_GET_ITEM(addresses, i))) Py_RETURN_FALSE;
    } catch (...) {  // a tensor without memory
        Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
}

static PyObject *same_versions(PyObject *, PyObject *const *args, Py_ssize_t) {
    PyObject *tensors = args[0], *versions = args[1];
    Py_ssize_t size = PyList_GET_SIZE(tensors);
    if (PyList_GET_SIZE(versions) != size) Py_RETURN_FALSE;
    for (Py_ssize_t i = 0; i < size; i++) {
        int same = equal(version->get(PyList_GET_ITEM(tensors, i), version->closure), PyList_GET_ITEM(versions, i));
        if (same < 0) return nullptr;
        if (!same) Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
}

static bool gives(PyObject *tensor, PyGetSetDef *what, PyObject *wanted) {
    return equal(what->get(tensor, what->closure), wanted) == 1;
}

// Its inputs, if a call has these names and kinds; else None.
static PyObject *inputs_like(PyObject *, PyObject *const *args, Py_ssize_t) {
    PyObject *kinds = args[0], *names = args[1], *given = args[2], *named = args[3];
    Py_ssize_t size = PyTuple_GET_SIZE(kinds), count = size - PyTuple_GET_SIZE(names);
    if (!PyTuple_Check(given) || !PyDict_Check(named)) return PyErr_Format(PyExc_TypeError, "a tuple and a dict");
    if (PyTuple_GET_SIZE(given) != count || PyDict_GET_SIZE(named) != size - count) Py_RETURN_NONE;
    PyObject *found = PyList_New(size);
    bool same = found;
    for (Py_ssize_t i = 0; same && i < size; i++) {
        PyObject *one = i < count ? PyTuple_GET_ITEM(given, i) : PyDict_GetItemWithError(named, PyTuple_GET_ITEM(names, i - count));
        if (!(same = one)) break;
        PyList_SET_ITEM(found, i, Py_NewRef(one));
        PyObject *kind = PyTuple_GET_ITEM(kinds, i), *type = (PyObject *)Py_TYPE(one);
        same = (type == plain || type == parameter) && gives(one, layout, dense) && gives(one, shape, PyTuple_GET_ITEM(kind, 0)) &&
               gives(one, dtype, PyTuple_GET_ITEM(kind, 1)) && gives(one, device, PyTuple_GET_ITEM(kind, 2));
    }
    if (same) return found;
    Py_XDECREF(found);
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_RuntimeError)) return nullptr;
    PyErr_Clear();  // a nested tensor has no shape
    Py_RETURN_NONE;
}

static PyObject *read_from(PyObject *, PyObject *const *args, Py_ssize_t) {
    PyObject *copies = args[1], *strides = args[4], *reading = args[5], *inputs = args[6];
    auto set = reinterpret_cast<int (*)(void *, void *, void *, void *)>(PyLong_AsVoidPtr(args[0]));
    void *graph = PyLong_AsVoidPtr(args[2]), *context = PyLong_AsVoidPtr(args[3]);
    Py_ssize_t size = PyTuple_GET_SIZE(copies);
    if (!(PyList_Check(inputs) || PyTuple_Check(inputs)) || PySequence_Fast_GET_SIZE(inputs) != size)
        return PyErr_Format(PyExc_TypeError, "as many inputs as copies");
    for (Py_ssize_t i = 0; i < size; i++) {
        if (!PyLong_AsVoidPtr(PyList_GET_ITEM(reading, i))) Py_RETURN_FALSE;
        PyObject *one = PySequence_Fast_GET_ITEM(inputs, i), *laid_out = PyTuple_GET_ITEM(strides, i);
        int same = laid_out == Py_None ? equal(PyObject_CallOneArg(is_contiguous, one), Py_True)
                                       : equal(PyObject_CallOneArg(stride, one), laid_out);
        if (same > 0) same = equal(PyObject_CallOneArg(is_neg, one), Py_False);
        if (same < 0) return nullptr;
        if (!same) Py_RETURN_FALSE;
    }
    for (Py_ssize_t i = 0; i < size; i++) {
        PyObject *copy = PyTuple_GET_ITEM(copies, i), *address;
        void *now;
        try {
            now = data_of(PySequence_Fast_GET_ITEM(inputs, i));
        } catch (...) {  // a tensor without memory
            Py_RETURN_FALSE;
        }
        if (!now) Py_RETURN_FALSE;
        if (now == PyLong_AsVoidPtr(PyList_GET_ITEM(reading, i))) continue;
        void *node = PyLong_AsVoidPtr(PyTuple_GET_ITEM(copy, 0)), *params = PyLong_AsVoidPtr(PyTuple_GET_ITEM(copy, 1));
        *static_cast<void **>(PyLong_AsVoidPtr(PyTuple_GET_ITEM(copy, 2))) = now;
        int failed;
        Py_BEGIN_ALLOW_THREADS;  // another thread may be in the driver for long
        failed = set(graph, node, params, context);
        Py_END_ALLOW_THREADS;
        if (!(address = PyLong_FromVoidPtr(failed ? NOWHERE : now))) return nullptr;
        PyList_SetItem(reading, i, address);
        if (failed) Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
}

// 1 if autograd would follow one of these tensors, 0 if none.
static int followed(PyObject *inputs) {
    int enabled = equal(PyObject_CallNoArgs(is_grad_enabled), Py_True);
    if (enabled <= 0) return enabled;
    bool none = true;
    for (Py_ssize_t i = 0, size = PyList_GET_SIZE(inputs); none && i < size; i++)
        none = gives(PyList_GET_ITEM(inputs, i), requires_grad, Py_False);
    return PyErr_Occurred() ? -1 : !none;
}

// Inputs are bound and read if all that is asked has its usual answer.
static PyObject *ready(PyObject *, PyObject *const *args, Py_ssize_t) {
    PyObject *asked = args[0], *answers = args[1], *bind = args[2], *read = args[3], *given = args[4], *named = args[5];
    for (Py_ssize_t i = 0, size = PyTuple_GET_SIZE(asked); i < size; i++) {
        int same = equal(PyObject_CallNoArgs(PyTuple_GET_ITEM(asked, i)), PyTuple_GET_ITEM(answers, i));
        if (same < 0) return nullptr;
        if (!same) Py_RETURN_FALSE;
    }
    PyObject *inputs = PyObject_CallFunctionObjArgs(bind, given, named, nullptr);
    if (!inputs) return nullptr;
    int unusual = inputs == Py_None ? 1 : followed(inputs);
    PyObject *done = unusual < 0 ? nullptr : unusual ? Py_NewRef(Py_False) : PyObject_CallOneArg(read, inputs);
    Py_DECREF(inputs);
    return done;
}

static PyObject *use(PyObject *, PyObject *const *args, Py_ssize_t) {
    PyGetSetDef **getters[] = {&version, &layout, &shape, &dtype, &device, &requires_grad};
    data_of = reinterpret_cast<void *(*)(PyObject *)>(PyLong_AsVoidPtr(args[0]));
    for (int i = 0; i < 6; i++) {
        if (!Py_IS_TYPE(args[i + 1], &PyGetSetDescr_Type)) return PyErr_Format(PyExc_TypeError, "no getter");
        *getters[i] = reinterpret_cast<PyGetSetDescrObject *>(args[i + 1])->d_getset;
    }
    dense = Py_NewRef(args[7]), plain = Py_NewRef(args[8]), parameter = Py_NewRef(args[9]);
    is_contiguous = Py_NewRef(args[10]), stride = Py_NewRef(args[11]), is_neg = Py_NewRef(args[12]);
    is_grad_enabled = Py_NewRef(args[13]);
    Py_RETURN_NONE;
}

#define PASS(name) {#name, reinterpret_cast<PyCFunction>(reinterpret_cast<void *>(name)), METH_FASTCALL, nullptr}
static PyMethodDef methods[] = {PASS(same_objects), PASS(same_state), PASS(same_memory), PASS(same_versions),
                                PASS(inputs_like),  PASS(read_from), PASS(ready),  PASS(use), {}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "unchanged", nullptr, -1, methods};
PyMODINIT_FUNC PyInit_unchanged() { return PyModule_Create(&module); }
