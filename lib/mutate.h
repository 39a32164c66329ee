/* SPDX-License-Identifier: MIT */
/* Bugs planted for tests: a build with FSDP_MUTATIONS can switch one on; each must be caught. In every other build the
 * conditions are constants and vanish. tests/race/mutations.sh runs them all and says what catches which. */
#ifndef FSDP_LIB_MUTATE_H
#define FSDP_LIB_MUTATE_H

/* Name, what is wrong then. Numbers are 1, 2, … in this order. */
#define FSDP__MUTANTS(X)                                                                                       \
    /* the allocator */                                                                                        \
    X(NO_WAIT_AT_ALLOC, "wait left out: an allocation takes bytes that are not covered and does not wait")     \
    X(GUARD_DROPPED, "dropped guard: a stream that comes in by record_stream skips the last owner")            \
    X(MERGE_LOSES_CLOCK, "vector lost on merge: of several fragments only the lowest one's clock counts")      \
    X(MERGE_ANY, "fragments with different clocks become one, with the lower one's clock")                     \
    X(CUT_LOSES_CLOCK, "what is left above a cut forgets its clock")                                           \
    X(THIRD_STREAM_LOST, "a block that three streams used forgets the third")                                  \
    X(RECORD_FORGOTTEN, "forgotten record_stream: the stream is not noted")                                    \
    X(USE_AT_ALLOC, "the own stream's use is taken at allocation, not at free")                                \
    X(USE_AT_RECORD, "record_stream takes the use at the call, not at free")                                   \
    X(RECORD_USE_EARLY, "record_use notes the epoch before: a fence before the use covers it")                 \
    X(FREE_WRONG_STREAM, "free notes the use of another stream than the block's")                              \
    X(WRONG_END, "the high end of a range is judged by its low end")                                           \
    X(EVERYTHING_COVERED_BY_OWN, "a range freed by the asking stream counts as covered, whoever else used it") \
    X(RUN_ACROSS, "between the ends of a range, fragments that are not covered count as covered")              \
    X(UNTOUCHED_LOST, "a planned buffer that nothing touched forgets what it came after")                      \
    X(TRIM_NO_DRAIN, "trim gives memory back to the device while streams still use it")                        \
    /* the clocks */                                                                                           \
    X(EPOCH_OFF_BY_ONE, "a frontier counts as covered one epoch too early")                                    \
    X(STALE_FENCE, "stale fence: the one before the one that covers is waited for")                            \
    X(RING_OVERWRITTEN, "a fence that left the ring counts as passed")                                         \
    X(SNAPSHOT_AT_WAIT, "a wait learns what the other stream knows now, not when it recorded")                 \
    X(NO_SNAPSHOT_OF_SELF, "a fence covers the epoch after it too")                                            \
    X(FIRST_NEED_ONLY, "of several streams that are missing, only one is waited for")                          \
    X(SLOT_FORGETS, "the next stream of a slot begins its epochs anew")                                        \
    /* the step */                                                                                             \
    X(GATHER_NO_WAIT_USED, "a gather does not wait for the last owner of its bytes")                           \
    X(GATHER_NO_WAIT_UPDATED, "missing updated edge: a gather reads a shard that is still written")            \
    X(GATHER_WRONG_PLACE, "units are gathered to the range's first byte, whatever was planned")                \
    X(COMPUTE_NO_WAIT_READY, "compute does not wait until the unit is gathered")                               \
    X(USE_EARLY, "the use of a gathered buffer is noted in the epoch before the one it is in")                 \
    X(KEPT_GIVEN_BACK, "a unit that is kept until its next visit is given back")                               \
    X(SECOND_STREAM_LOST, "a window's end does not wait for its second stream")                                \
    X(STALE_KEPT, "a gathered unit is used after its shard was updated")                                       \
    X(GRADS_NO_WAIT_REDUCED, "gradients are zeroed while their buffer's last owner is being reduced")          \
    X(REDUCE_NO_WAIT_GRADS, "a reduction does not wait for the gradients")                                     \
    X(UPDATE_NO_WAIT_REDUCED, "the optimizer does not wait for reductions")                                    \
    X(SQUARES_NO_WAIT_REDUCED, "the norm's squares do not wait for reductions")                                \
    X(UPDATE_NO_WAIT_GATHERS, "the optimizer does not wait for gathers that still read the shard")             \
    X(KEPT_IN_THE_WAY, "a unit is kept until its next visit where another is planned before")                  \
    X(EVICT_NEAREST, "off plan, the prefetched unit that is needed next is evicted")                           \
    /* captures */                                                                                             \
    X(CAPTURE_NOT_AFTER, "a capture's beginning does not wait for what streams were given before")             \
    X(CAPTURE_NO_FORK, "a stream that is given something inside a capture does not come into it")              \
    X(CAPTURE_NO_JOIN, "a stream that came into a capture does not join at its end")                           \
    X(CAPTURE_UNCOVERED, "what was recorded inside a capture is waited for afterwards")                        \
    X(REPLAY_TOO_EARLY, "a replay does not wait for what other streams were given")                            \
    X(REPLAY_FORGOTTEN, "what is given after a replay does not wait for it")                                   \
    X(NEW_STREAM_TOO_EARLY, "a stream that is made after a replay does not come after it")                     \
    X(REPLAY_ANYWHERE, "a replay does not look at what is gathered")                                           \
    X(REPLAY_ONE_INPUT, "all steps of a capture read the host's values of the first")

enum {
    FSDP__MUTANT_NONE = 0,
#define FSDP__MUTANT_NUMBER(name, what) FSDP__MUTANT_##name,
    FSDP__MUTANTS(FSDP__MUTANT_NUMBER)
#undef FSDP__MUTANT_NUMBER
        FSDP__N_MUTANTS
};

#ifdef FSDP_MUTATIONS
extern int fsdp__mutant;
#define FSDP__MUTATED(which) (fsdp__mutant == FSDP__MUTANT_##which)
#else
#define FSDP__MUTATED(which) 0
#endif

#endif
