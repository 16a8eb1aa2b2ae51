"""NVIDIA's real TensorRT Python bindings over stub libraries: no libnvinfer, CUDA or GPU (x86-64 Linux, g++, binutils).

    python stub_trt.py 10.16.1.11 DEST --dist tensorrt-cu13-bindings
    PYTHONPATH=DEST python -c "import tensorrt as trt; print(trt.Builder(trt.Logger()).create_builder_config())"

The bindings wheel is unpacked unchanged into DEST. It links about ten C entry points; DEST/tensorrt_libs (the package
that the bindings import first) loads a stub library that exports them. Each returns a "fake": an object whose every C++
virtual method returns another fake (a pointer; as bool True, as C string ""), a zeroed struct, or what a test had it
answer. An entry point returns the same fake each time, and so does a method, so that a test can prepare what the code
under test will get. Enums, classes, docstrings and pybind11's argument checks are the real ones; nothing is computed.

In the test process, `import tensorrt_libs as stub` gives `stub.answer`, `stub.hook`, `stub.invoke` and `stub.calls`.
Nothing of the wheel is kept outside DEST, which must not be committed.
"""

from __future__ import annotations

import argparse
import ctypes
import pathlib
import re
import subprocess
import sys
import tempfile
import zipfile

CPP = r"""
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <typeinfo>
#include <utility>
#include <vector>
namespace {
using Word = intptr_t;
constexpr int kSlots = 320, kLog = 65536;
constexpr Word kMagic = 0x5ab05ab05ab05ab;
struct Answer { bool fixed = false; Word value = 0, size = 0; struct Fake* child = nullptr; };
struct Fake { void** vptr; Fake* impl; Fake* own;     // a layer holds a second pointer, for its own kind's methods
              Word magic, id; std::map<std::pair<int, std::string>, Answer>* answers;
              char keyed[kSlots]; bool hooked[kSlots]; };
struct Anchor { virtual ~Anchor() {} };
alignas(256) void* table[32 + kSlots];                 // slots from [32] on, so a vptr's low byte is 0: ""
Word calls[kLog][5], ncalls;                           // object id, slot, first three arguments
Word last[2];
std::vector<Fake*>& fakes() { static std::vector<Fake*> all; return all; }
struct Stack { Word words[16]; };                       // what a caller passes by value in memory, as 8.6 does a Dims
void (*hook)(Word, Word, Word, Word, Word, const Stack*);
bool isFake(Fake* f) { return f && f->magic == kMagic && f->impl == f; }
Fake* make();
Answer& called(Fake* self, int slot, Word a, Word b, Word c, const Stack* stack) {
    Word* row = calls[ncalls++ % kLog];
    row[0] = self->id; row[1] = slot; row[2] = a; row[3] = b; row[4] = c;
    if (self->hooked[slot] && hook) hook(self->id, slot, a, b, c, stack);
    last[0] = self->id; last[1] = slot;                // after the hook, which may make calls of its own
    std::string key = self->keyed[slot] == 1 ? std::to_string(static_cast<int32_t>(a))
                    : self->keyed[slot] == 2 ? reinterpret_cast<const char*>(a) : "";
    return (*self->answers)[{slot, key}];
}
Word enter(int slot, Fake* self, Word a, Word b, Word c, Word d, const Stack* stack) {
    if (!isFake(self)) {                               // struct returned by value: (hidden result, this, arguments...)
        void* result = static_cast<void*>(self);
        Answer& answer = called(reinterpret_cast<Fake*>(a), slot, b, c, d, stack);
        if (answer.size) memcpy(result, reinterpret_cast<void*>(answer.value), answer.size); else memset(result, 0, 24);
        return reinterpret_cast<Word>(result);
    }
    Answer& answer = called(self, slot, a, b, c, stack);
    if (answer.fixed) return answer.value;
    if (!answer.child) answer.child = make();
    return reinterpret_cast<Word>(answer.child);
}
template <int S> Word method(Fake* self, Word a, Word b, Word c, Word d, Word, Stack stack) {
    return enter(S, self, a, b, c, d, &stack);
}
template <int... S> void fill(std::integer_sequence<int, S...>) {
    ((table[32 + S] = reinterpret_cast<void*>(&method<S>)), ...);
    table[31] = const_cast<std::type_info*>(&typeid(Anchor));  // pybind11 asks for typeid and offset to top (0)
}
Fake* make() {                                         // never freed; the low byte is 16, so it reads as True
    if (fakes().empty()) fill(std::make_integer_sequence<int, kSlots>());
    size_t size = (sizeof(Fake) + 511) / 256 * 256;
    char* raw = static_cast<char*>(memset(aligned_alloc(256, size), 0, size)) + 16;
    Fake* f = reinterpret_cast<Fake*>(raw);
    f->vptr = table + 32; f->impl = f; f->own = f; f->magic = kMagic; f->id = fakes().size();
    f->answers = new std::map<std::pair<int, std::string>, Answer>;
    fakes().push_back(f);
    return f;
}
Word once(int entry, Word a, Word b, Word c) {
    static std::map<int, Fake*> made;
    Word* row = calls[ncalls++ % kLog];
    row[0] = -1; row[1] = entry; row[2] = a; row[3] = b; row[4] = c;
    if (!made[entry]) made[entry] = make();
    return reinterpret_cast<Word>(made[entry]);
}
}
extern "C" Word stub_calls(Word out[][5]) { memcpy(out, calls, sizeof calls); return ncalls; }
extern "C" Word stub_count() { return ncalls; }
extern "C" void stub_last(Word out[2]) { memcpy(out, last, sizeof last); }
extern "C" Word stub_address(Word id) { return reinterpret_cast<Word>(fakes()[id]); }
extern "C" void stub_key(Word id, Word slot, Word how) { fakes()[id]->keyed[slot] = how; }
extern "C" void stub_set(Word id, Word slot, const char* key, Word value, Word size) {
    Answer& answer = (*fakes()[id]->answers)[{static_cast<int>(slot), key}];
    answer.fixed = true; answer.value = value; answer.size = size;
}
extern "C" void stub_reset() {
    for (Fake* fake : fakes()) {
        fake->answers->clear();
        memset(fake->keyed, 0, sizeof fake->keyed);
        memset(fake->hooked, 0, sizeof fake->hooked);
    }
}
extern "C" void stub_unset(Word id, Word slot) { (*fakes()[id]->answers)[{static_cast<int>(slot), ""}].fixed = false; }
extern "C" void stub_hooked(Word id, Word slot, Word on) { fakes()[id]->hooked[slot] = on; }
extern "C" void stub_hook(void (*call)(Word, Word, Word, Word, Word, const Stack*)) { hook = call; }
extern "C" Word stub_invoke(void* object, Word slot, Word a, Word b, Word c, Word d, Word e) {
    using Method = Word (*)(void*, Word, Word, Word, Word, Word);
    return reinterpret_cast<Method>((*static_cast<void***>(object))[slot])(object, a, b, c, d, e);
}
#define ENTRY(number, name) extern "C" Word name(Word a, Word b, Word c) { return once(number, a, b, c); }
"""

LIBS = '''"""Stub libraries in place of TensorRT's own: see stub_trt.py."""
import ctypes, pathlib, struct

_libs = [ctypes.CDLL(str(pathlib.Path(__file__).with_name(n)), mode=ctypes.RTLD_GLOBAL) for n in {names!r}]
_lib, entries, VERSION = _libs[0], {entries!r}, {version!r}
_word = ctypes.c_ssize_t
_lib.stub_invoke.restype = _lib.stub_calls.restype = _lib.stub_count.restype = _lib.stub_address.restype = _word
_log, _kept, _hooks = ((_word * 5) * 65536)(), [], {{}}
failures = []  # what hooks raised: nothing can be raised through native code
_callback = ctypes.CFUNCTYPE(None, _word, _word, _word, _word, _word, _word)

@_callback
def _hooked(number, slot, a, b, c, stack):
    try:
        _hooks[number, slot](a, b, c, stack)
    except BaseException as error:
        failures.append(error)

_lib.stub_hook(_hooked)
_unconverted = (TypeError, ValueError, MemoryError, UnicodeDecodeError, OverflowError, RuntimeError)

def calls(since=0):
    """(object id, vtable slot, first three arguments) of the native calls after the first `since`, oldest first."""
    n = _lib.stub_calls(_log)
    assert n - since <= 65536, "the log has run over"
    return [tuple(_log[i % 65536]) for i in range(since, n)]

def count():
    """How many native calls there have been."""
    return _lib.stub_count()

def slot(call):
    """(object id, vtable slot) of the last native call that `call()` makes."""
    before = count()
    try:
        result = call()  # held: dropping it would call its destructor
    except _unconverted:
        pass  # pybind11 could not convert what the fake answered; the call was still seen
    if count() == before:
        raise LookupError("no native call was made")
    found = (_word * 2)()
    _lib.stub_last(found)
    return tuple(found)

def address(call):
    """The address of the native object that `call()` calls."""
    return _lib.stub_address(_word(slot(call)[0]))

def keyed(call, how):
    """From now on the method that `call()` calls answers by its first argument: "int", or "name" for a C string."""
    _lib.stub_key(*map(_word, slot(call)), _word({{"int": 1, "name": 2}}[how]))

def answer(call, value, key=""):
    """Let the method that `call()` calls return this int, bool, enum, str, or bytes of a struct."""
    size = 0
    if isinstance(value, (str, bytes)):
        size = len(value) if isinstance(value, bytes) else 0
        _kept.append(ctypes.create_string_buffer(value.encode() if isinstance(value, str) else value))
        value = ctypes.addressof(_kept[-1])
    _lib.stub_set(*map(_word, slot(call)), str(key).encode(), _word(int(value)), _word(size))

def reset():
    """Forget every answer and every hook."""
    _lib.stub_reset()
    _hooks.clear()  # only now: it drops what the hooks held, whose destructors are native calls

def unanswer(call):
    """Let the method that `call()` calls answer a fake again."""
    _lib.stub_unset(*map(_word, slot(call)))

def hook(call, function):
    """Inside each call of the method, call `function(a, b, c, stack)`: its first three arguments in registers, as
    integers, and the address of those on the stack, where 8.6 puts what it takes by value."""
    place = slot(call)
    _hooks[place] = function
    _lib.stub_hooked(*map(_word, place), _word(1))

def invoke(pointer, slot, *arguments):
    """Call a virtual method of a native object by its slot, as TensorRT would; the result as an integer."""
    words = [_word(a) for a in (*arguments, *[0] * (5 - len(arguments)))]
    return _lib.stub_invoke(ctypes.c_void_p(pointer), _word(slot), *words)

def dims(*sizes):
    """The bytes of a Dims: 32-bit sizes to TensorRT 9, 64-bit from 10 on."""
    if int(VERSION.split(".")[0]) < 10:
        return struct.pack("i8i", len(sizes), *sizes, *[0] * (8 - len(sizes)))
    return struct.pack("ixxxx8q", len(sizes), *sizes, *[0] * (8 - len(sizes)))

def read_dims(pointer):
    """The sizes of the Dims at this address."""
    layout = "i8i" if int(VERSION.split(".")[0]) < 10 else "ixxxx8q"
    count, *sizes = struct.unpack(layout, ctypes.string_at(pointer, struct.calcsize(layout)))
    return tuple(sizes[:count])

def text(pointer):
    """The C string at this address."""
    return ctypes.string_at(pointer).decode()

def host_memory(make, data):
    """Let the IHostMemory that `make()` returns hold these bytes."""
    import tensorrt

    host = make()
    answer(lambda: host.nbytes, len(data))
    answer(lambda: host.dtype, tensorrt.int8)
    known = [slot(lambda: host.nbytes), slot(lambda: host.dtype)]
    before = count()
    view = memoryview(host)
    found = next(row[:2] for row in calls(before) if row[0] == known[0][0] and row[:2] not in known)
    del view
    _kept.append(ctypes.create_string_buffer(data, len(data)))
    _lib.stub_set(*map(_word, found), b"", _word(ctypes.addressof(_kept[-1])), _word(0))
'''


def build(version: str, dest: pathlib.Path, dist: str) -> list[str]:
    """Make a site with the bindings of `dist` at `version` in `dest`; the entry points that were stubbed."""
    for package in ("tensorrt_libs", "tensorrt"):
        (dest / package).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as tmp:
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", tmp]
        subprocess.run([*pip, f"{dist}=={version}"], check=True)
        zipfile.ZipFile(next(pathlib.Path(tmp).glob("*.whl"))).extractall(dest)
        binding, host = dest / "tensorrt_bindings" / "tensorrt.so", ctypes.CDLL(None)
        names = re.findall(r"NEEDED.*\[(libnv\S+)\]", subprocess.check_output(["readelf", "-d", binding], text=True))
        undefined = re.findall(r" U ([^@\s]+)$", subprocess.check_output(["nm", "-D", binding], text=True), re.M)
        entries = [s for s in undefined if not s.startswith(("Py", "_Py")) and not hasattr(host, s)]
        source = pathlib.Path(tmp, "stub.cpp")
        source.write_text(CPP + "".join(f"ENTRY({n}, {s})\n" for n, s in enumerate(entries)))
        for i, name in enumerate(names):
            gxx = ["g++", "-std=c++17", "-O1", "-fPIC", "-shared", "-w", f"-Wl,-soname,{name}", "-x", "c++"]
            subprocess.run([*gxx, "/dev/null" if i else source, "-o", dest / "tensorrt_libs" / name], check=True)
    libs = LIBS.format(names=names, entries=entries, version=version)
    (dest / "tensorrt_libs" / "__init__.py").write_text(libs)
    shim = "import sys, tensorrt_bindings\nsys.modules[__name__] = tensorrt_bindings\n"
    (dest / "tensorrt" / "__init__.py").write_text(shim)
    return entries


if __name__ == "__main__":
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("version")
    cli.add_argument("dest", type=pathlib.Path)
    cli.add_argument("--dist", default="tensorrt-cu13-bindings")
    args = cli.parse_args()
    print("stubbed:", *build(args.version, args.dest, args.dist))
