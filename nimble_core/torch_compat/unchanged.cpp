// The passes of unchanged.py, without a Python object for each thing looked at. None of them runs Python code on the way.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#ifdef Py_GIL_DISABLED
#error "other threads could change what these read"
#endif

static void *(*data_of)(PyObject *);  // torch's own, which code that Inductor generates calls
static PyGetSetDef *version;          // of Tensor._version
static PyGetSetDef *layout, *shape, *dtype, *device;
static PyObject *dense, *plain, *parameter;
static const int DEPTH = 8;

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
        PyObject *now = version->get(PyList_GET_ITEM(tensors, i), version->closure);
        if (!now) return nullptr;
        int found = PyObject_RichCompareBool(now, PyList_GET_ITEM(versions, i), Py_EQ);
        Py_DECREF(now);
        if (found < 0) return nullptr;
        if (!found) Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
}

static bool gives(PyObject *tensor, PyGetSetDef *what, PyObject *wanted) {
    PyObject *found = what->get(tensor, what->closure);
    bool same = found && (found == wanted || PyObject_RichCompareBool(found, wanted, Py_EQ) == 1);
    Py_XDECREF(found);
    return same;
}

static PyObject *same_kinds(PyObject *, PyObject *const *args, Py_ssize_t) {
    PyObject *tensors = args[0], *kinds = args[1];
    Py_ssize_t size = PyTuple_GET_SIZE(kinds);
    bool same = PyList_CheckExact(tensors) && PyList_GET_SIZE(tensors) == size;
    for (Py_ssize_t i = 0; same && i < size; i++) {
        PyObject *one = PyList_GET_ITEM(tensors, i), *kind = PyTuple_GET_ITEM(kinds, i), *type = (PyObject *)Py_TYPE(one);
        same = (type == plain || type == parameter) && gives(one, layout, dense) && gives(one, shape, PyTuple_GET_ITEM(kind, 0)) &&
               gives(one, dtype, PyTuple_GET_ITEM(kind, 1)) && gives(one, device, PyTuple_GET_ITEM(kind, 2));
    }
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_RuntimeError)) return nullptr;
    PyErr_Clear();  // a nested tensor has no shape
    return PyBool_FromLong(same);
}

static PyObject *use(PyObject *, PyObject *const *args, Py_ssize_t) {
    PyGetSetDef **getters[] = {&version, &layout, &shape, &dtype, &device};
    data_of = reinterpret_cast<void *(*)(PyObject *)>(PyLong_AsVoidPtr(args[0]));
    for (int i = 0; i < 5; i++) {
        if (!Py_IS_TYPE(args[i + 1], &PyGetSetDescr_Type)) return PyErr_Format(PyExc_TypeError, "no getter");
        *getters[i] = reinterpret_cast<PyGetSetDescrObject *>(args[i + 1])->d_getset;
    }
    dense = Py_NewRef(args[6]), plain = Py_NewRef(args[7]), parameter = Py_NewRef(args[8]);
    Py_RETURN_NONE;
}

#define PASS(name) {#name, reinterpret_cast<PyCFunction>(reinterpret_cast<void *>(name)), METH_FASTCALL, nullptr}
static PyMethodDef methods[] = {PASS(same_objects), PASS(same_state), PASS(same_memory), PASS(same_versions), PASS(same_kinds),
                                PASS(use), {}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "unchanged", nullptr, -1, methods};
PyMODINIT_FUNC PyInit_unchanged() { return PyModule_Create(&module); }
