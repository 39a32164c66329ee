#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""ctypes_train.py LIBFSDP.SO: the library from another language. Python registers two units, fills them by a callback,
trains two steps whose gradients a host call on the stream writes, and finds the parameters where optim.h says."""
import math
import signal
import struct
import sys
from ctypes import (CDLL, CFUNCTYPE, POINTER, Structure, byref, c_bool, c_char_p, c_double, c_float, c_int, c_int32,
                    c_size_t, c_uint32, c_uint64, c_void_p, cast, sizeof)

FP32, VALUE_MASTER, PASS_TRAIN = 1, 0, 0
SECOND = 1_000_000_000
BETA1, BETA2, EPS, DECAY = 0.9, 0.999, 1e-8, 0.1


class Sized(Structure):
    """A public struct: its first field is its size. Keywords set fields; the rest is zero."""

    def __init__(self, **fields):
        super().__init__(size=sizeof(type(self)), **fields)


class Config(Sized):
    _fields_ = [("size", c_size_t), ("backend", c_void_p), ("backend_config", c_void_p), ("debug", c_uint32),
                ("reduce_comm", c_bool), ("timeout_ns", c_uint64), ("host_alloc", c_void_p), ("host_free", c_void_p),
                ("host_arg", c_void_p), ("host_stats", c_void_p), ("log", c_void_p), ("log_arg", c_void_p),
                ("pinned", c_void_p * 6), ("flight_path", c_char_p)]


class ModelConfig(Sized):
    _fields_ = [("size", c_size_t), ("name", c_char_p), ("depth", c_uint32), ("prefetch_bytes", c_uint64),
                ("grad_buffers", c_uint32), ("accumulation", c_int), ("grad_sum", c_bool)]


class ParamConfig(Sized):
    _fields_ = [("size", c_size_t), ("compute_dtype", c_int), ("frozen", c_bool), ("no_decay", c_bool),
                ("lr_scale", c_float)]


class AdamwConfig(Sized):
    _fields_ = [("size", c_size_t), ("beta1", c_float), ("beta2", c_float), ("eps", c_float), ("weight_decay", c_float)]


class AdamwArgs(Sized):
    _fields_ = [("size", c_size_t), ("lr", c_float), ("grad_scale", c_double), ("max_norm", c_float), ("skip", c_bool)]


class PassArgs(Sized):
    _fields_ = [("size", c_size_t), ("pass_", c_int32), ("index", c_uint32), ("count", c_uint32), ("next", c_int32)]


class View(Sized):
    _fields_ = [("size", c_size_t), ("n_params", c_uint32), ("grads_zeroed", c_bool), ("params", POINTER(c_void_p)),
                ("grads", POINTER(c_void_p))]


class Report(Sized):
    _fields_ = [("size", c_size_t), ("step", c_uint64), ("updates", c_uint64), ("skipped", c_bool), ("lr", c_float),
                ("grad_norm", c_float), ("clip_scale", c_float), ("sums", c_float * 16)]


class Range(Structure):
    _fields_ = [("param", c_void_p), ("begin", c_uint64), ("count", c_uint64)]


FILL = CFUNCTYPE(c_int, c_void_p, POINTER(Range), c_void_p)
HOST_CALL = CFUNCTYPE(None, c_void_p)


def floats(address):
    return cast(address, POINTER(c_float))


def fp32(value):
    return struct.unpack("f", struct.pack("f", value))[0]


class Library:
    """Each function by its own name; a status that is not FSDP_OK becomes an exception with the library's sentence."""

    def __init__(self, path):
        self.so = CDLL(path)
        self.so.fsdp_last_error.restype = c_char_p

    def __getattr__(self, name):
        function = getattr(self.so, "fsdp_" + name)

        def call(*arguments):
            status = function(*arguments)
            if status != 0:
                raise RuntimeError(f"fsdp_{name}: {status}: {self.so.fsdp_last_error().decode()}")
        return call


class Weight:
    """A parameter, and the same one as plain Python computes it."""

    def __init__(self, name, dims, decay, lr_scale):
        self.name, self.dims, self.decay, self.lr_scale = name, dims, decay, lr_scale
        self.n = math.prod(dims)
        self.handle = c_void_p()
        self.w = [fp32(math.sin(i + len(name))) for i in range(self.n)]
        self.m = [0.0] * self.n
        self.v = [0.0] * self.n

    def gradient(self, step):
        return [fp32(0.25 * math.cos(3 * i + step) + 0.01 * (i + 1)) for i in range(self.n)]

    def update(self, step, lr, clip):
        """optim.h's formula, in double."""
        lr = lr * self.lr_scale
        for i, gradient in enumerate(self.gradient(step)):
            g = gradient * clip
            self.m[i] = BETA1 * self.m[i] + (1 - BETA1) * g
            self.v[i] = BETA2 * self.v[i] + (1 - BETA2) * g * g
            direction = self.m[i] / (1 - BETA1 ** step) / (math.sqrt(self.v[i] / (1 - BETA2 ** step)) + EPS)
            self.w[i] -= lr * (direction + self.decay * self.w[i])


def expect(what, got, want, tolerance):
    if not abs(got - want) <= tolerance * max(1.0, abs(want)):
        raise AssertionError(f"{what}: {got!r}, expected {want!r}")


def register(fsdp, ctx):
    units = [[Weight("a.w", (3, 5), DECAY, 1.0), Weight("a.b", (5,), 0.0, 1.0)], [Weight("b.w", (7, 11), DECAY, 0.5)]]
    model, opt = c_void_p(), c_void_p()
    config = ModelConfig(name=b"ctypes", depth=1, grad_buffers=2)
    fsdp.model_create(ctx, byref(config), byref(model))
    handles = []
    for index, weights in enumerate(units):
        unit = c_void_p()
        fsdp.model_add_unit(model, b"unit.%d" % index, None, byref(unit))
        for weight in weights:
            policy = ParamConfig(no_decay=weight.decay == 0.0, lr_scale=weight.lr_scale)
            dims = (c_uint64 * len(weight.dims))(*weight.dims)
            fsdp.unit_add_param(unit, weight.name.encode(), c_uint32(len(weight.dims)), dims, byref(policy),
                                byref(weight.handle))
        handles.append(unit)
    adamw = AdamwConfig(beta1=BETA1, beta2=BETA2, eps=EPS, weight_decay=DECAY)
    fsdp.adamw_create(model, byref(adamw), byref(opt))
    fsdp.model_seal(model)
    return model, opt, list(zip(handles, units))


def fill(fsdp, model, by_handle):
    asked = {address: 0 for address in by_handle}

    def give(_, given, destination):
        wanted = given.contents
        weight, out = by_handle[wanted.param], floats(destination)
        for i in range(wanted.count):
            out[i] = weight.w[wanted.begin + i]
        asked[wanted.param] += wanted.count
        return 0
    fsdp.model_fill(model, FILL(give), None, c_int(FP32))
    for address, weight in by_handle.items():
        expect(f"elements asked for of {weight.name}", asked[address], weight.n, 0)


def train_step(fsdp, model, opt, stream, units, step, args):
    calls, seen = [], []

    def on_stream(function):
        calls.append(HOST_CALL(function))  # must outlive its run
        fsdp.stream_host_call(stream, calls[-1], None)

    def addresses(pointers, n):
        return [pointers[i] for i in range(n)]

    fsdp.pass_begin(model, byref(PassArgs(pass_=PASS_TRAIN, index=0, count=1, next=PASS_TRAIN)), stream)
    for unit, weights in units:
        view = View()
        fsdp.forward_begin(unit, stream, byref(view))
        params = addresses(view.params, view.n_params)

        def read(_, params=params, weights=weights):
            for address, weight in zip(params, weights):
                seen.append((weight, [floats(address)[i] for i in range(weight.n)]))
        on_stream(read)
        fsdp.forward_end(unit, stream)
    for unit, weights in reversed(units):
        view = View()
        fsdp.backward_begin(unit, stream, byref(view))
        grads = addresses(view.grads, view.n_params)

        def write(_, grads=grads, weights=weights):
            for address, weight in zip(grads, weights):
                for i, value in enumerate(weight.gradient(step)):
                    floats(address)[i] += value
        on_stream(write)
        fsdp.backward_end(unit, stream)
    fsdp.pass_end(model, stream)
    fsdp.adamw_step(opt, byref(args), stream)
    fsdp.stream_drain_host(stream, c_uint64(20 * SECOND))
    return seen


def check_step(fsdp, model, weights, step, args, seen):
    for weight, values in seen:
        for i, value in enumerate(values):
            expect(f"forward of step {step} sees {weight.name}[{i}]", value, weight.w[i], 1e-6)
    if len(seen) != len(weights):
        raise AssertionError(f"forward saw {len(seen)} parameters of {len(weights)}")
    norm = math.sqrt(sum(g * g for weight in weights for g in weight.gradient(step)))
    clip = args.max_norm / norm if 0 < args.max_norm < norm else 1.0
    report = Report()
    fsdp.step_report_get(model, c_uint64(step), c_uint64(20 * SECOND), byref(report))
    expect("report.step", report.step, step, 0)
    expect("report.grad_norm", report.grad_norm, norm, 1e-5)
    expect("report.clip_scale", report.clip_scale, clip, 1e-5)
    for weight in weights:
        weight.update(step, args.lr, clip)
        got = (c_float * weight.n)()
        fsdp.param_get(weight.handle, c_int(VALUE_MASTER), got, c_int(FP32))
        for i in range(weight.n):
            expect(f"step {step}: {weight.name}[{i}]", got[i], weight.w[i], 1e-6)


def main():
    signal.alarm(60)
    if len(sys.argv) != 2:
        sys.exit("usage: ctypes_train.py LIBFSDP.SO")
    fsdp = Library(sys.argv[1])
    with open("/proc/self/maps") as maps:  # Debian's cannot be loaded so late
        if "jemalloc" in maps.read():
            raise AssertionError("libfsdp.so brought jemalloc along")
    ctx, stream = c_void_p(), c_void_p()
    config = Config(timeout_ns=20 * SECOND)
    fsdp.context_create(byref(config), byref(ctx))
    fsdp.stream_create(ctx, b"compute", byref(stream))
    model, opt, units = register(fsdp, ctx)
    weights = [weight for _, group in units for weight in group]
    fill(fsdp, model, {weight.handle.value: weight for weight in weights})
    for step, max_norm in ((1, 0.0), (2, 0.5)):
        args = AdamwArgs(lr=0.05, grad_scale=1.0, max_norm=max_norm)
        check_step(fsdp, model, weights, step, args, train_step(fsdp, model, opt, stream, units, step, args))
    fsdp.model_destroy(model)
    fsdp.stream_release(stream)
    fsdp.context_destroy(ctx)
    print(f"2 steps, {sum(weight.n for weight in weights)} elements")


main()
