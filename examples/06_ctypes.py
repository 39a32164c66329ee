# SPDX-License-Identifier: MIT
"""06_ctypes.py LIBFSDP.SO: the library from Python alone, on as many ranks as a launcher starts (docs/bindings.md)."""
import sys
from ctypes import *
P, U32, U64, so = c_void_p, c_uint32, c_uint64, CDLL(sys.argv[1])
so.fsdp_last_error.restype = c_char_p                # ctypes takes a result for an int, and a number for one
def fsdp(name, *args):
    if so["fsdp_" + name](*args): raise RuntimeError(so.fsdp_last_error().decode())
def new(*fields, **given):                           # a struct: its fields after size; zero, but for what is given
    kind = type("", (Structure,), {"_fields_": [("size", c_size_t), *fields]})
    return kind(size=sizeof(kind), **given)

launch = new(("rank", U32), ("world", U32), ("local", U32 * 2), ("launcher", c_int), ("address", c_char * 256),
             ("port", c_uint16), ("nonce", U64))
fsdp("launch_from_env", byref(launch))
host = new(("local", P), ("rank", U32), ("jitter", U64 * 2), ("launch", P), ("more", P * 2), launch=addressof(launch))
config = new(("backend", P), ("backend_config", P), ("debug", U32), ("reduce_comm", c_bool), ("timeout_ns", U64),
             ("more", P * 13), backend_config=addressof(host), timeout_ns=60 * 10**9)
ctx, s, model, opt, weight, units = P(), P(), P(), P(), P(), [P(), P(), P()]
fsdp("context_create", byref(config), byref(ctx)), fsdp("stream_create", ctx, b"compute", byref(s))
fsdp("model_create", ctx, None, byref(model))        # None: the defaults
for i, unit in enumerate(units):
    fsdp("model_add_unit", model, b"u%d" % i, None, byref(unit))
    fsdp("unit_add_param", unit, b"w%d" % i, 1, (U64 * 1)(100), None, byref(weight))
fsdp("adamw_create", model, None, byref(opt)), fsdp("model_seal", model)    # values are zero, until fsdp_model_fill

train = new(("pass", c_int32), ("index", U32), ("count", U32), ("next", c_int32), count=1)
update = new(("lr", c_float), ("grad_scale", c_double), ("max_norm", c_float), ("skip", c_bool), lr=0.1, grad_scale=1)
view = new(("n_params", U32), ("zeroed", c_bool), ("params", POINTER(P)), ("grads", POINTER(P)))
for step in range(100):
    fsdp("pass_begin", model, byref(train), s)
    for way, unit in [("forward", u) for u in units] + [("backward", u) for u in units[::-1]]:
        fsdp(way + "_begin", unit, s, byref(view)), fsdp("stream_drain_host", s, U64(10**10))
        for i in range(100 if view.grads else 0):    # pulls to this rank's number: the mean over ranks is reached
            cast(view.grads[0], POINTER(c_float))[i] += cast(view.params[0], POINTER(c_float))[i] - launch.rank
        fsdp(way + "_end", unit, s)
    fsdp("pass_end", model, s), fsdp("adamw_step", opt, byref(update), s)
fsdp("param_get", weight, 0, found := (c_float * 100)(), 1)
print(f"rank {launch.rank} of {launch.world}: {found[99]:.1f}")
fsdp("model_destroy", model), fsdp("stream_release", s), fsdp("context_destroy", ctx)
