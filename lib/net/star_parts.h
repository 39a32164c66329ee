/* SPDX-License-Identifier: MIT */
/* Inside the star. One lock guards all of it; whoever holds it may send, only the star's own thread receives, and no callback
 * is called with it.
 *
 *  a call   each rank sends CALL: what it is in, and its blob if that is small. Once all are there the hub compares. Small: it
 *           answers RESULT. Large: GO to who has data, then DATA from them straight to where the result is put together, so
 *           that nothing is taken in before there is room, and no frame of another kind waits behind it. A rank without memory
 *           says so in its CALL, and the call is REFUSED to all.
 *  failing  FAIL comes in, or the hub sees it itself. The hub takes the first, asks everybody for words (ASK, WORDS), and says
 *           FAILED to all. Until then no rank's check has failed.
 *  leaving  BYE, then the end of the stream. An end without BYE is a rank that is gone. */
#ifndef FSDP_LIB_NET_STAR_PARTS_H
#define FSDP_LIB_NET_STAR_PARTS_H

#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/socket.h>

#include "call.h"
#include "check.h"
#include "monotonic.h"
#include "star.h"

enum {
    FSDP__SMALL_BYTES = 64, /* a blob up to here travels in its CALL */
    FSDP__PENDING = 128,    /* connections that have not said who they are; one more, and the oldest is let go */
    FSDP__HELLO_BYTES = 40,
    FSDP__HEAD_BYTES = 24,
    FSDP__CALL_BYTES = 24,
    FSDP__OUT_FRAMES = 8 /* more than one rank can have to say before it hears an answer */
};
#define FSDP__MS        1000000ull
#define FSDP__ASK_NS    (500 * FSDP__MS) /* for the words of all ranks */
#define FSDP__ANSWER_NS (600 * FSDP__MS) /* then a rank no longer waits for what the hub makes of a failure */
#define FSDP__LINGER_NS (1000 * FSDP__MS)

typedef enum fsdp__frame_kind {
    FSDP__FRAME_START = 1, /* hub: all ranks are here */
    FSDP__FRAME_CALL,      /* member: what, root, bytes, need; a small blob */
    FSDP__FRAME_GO,        /* hub: send your data */
    FSDP__FRAME_DATA,      /* member */
    FSDP__FRAME_RESULT,    /* hub */
    FSDP__FRAME_REFUSED,   /* hub: extra: a rank that had no memory; its need */
    FSDP__FRAME_LATE,      /* member: its deadline is over: timeout, bytes; number 0: while the star formed */
    FSDP__FRAME_FAIL,      /* member: extra: status; the sentence */
    FSDP__FRAME_FAILED,    /* hub: extra: status; the sentence that stays */
    FSDP__FRAME_ASK,       /* hub */
    FSDP__FRAME_WORDS,     /* member: its blob */
    FSDP__FRAME_BYE
} fsdp__frame_kind;

/* On the wire little-endian, 4 + 4 + 8 + 8 bytes, then the payload. */
typedef struct fsdp__frame {
    uint32_t kind, extra;
    uint64_t number; /* of the call */
    uint64_t bytes;  /* of the payload */
} fsdp__frame;

/* What is to be sent: a head, and perhaps a body that stays where it is until it is sent. */
typedef struct fsdp__out {
    unsigned char head[FSDP__HEAD_BYTES + FSDP__CALL_BYTES + FSDP__SMALL_BYTES];
    size_t head_bytes, body_bytes, sent;
    const unsigned char *body;
} fsdp__out;

/* One connection. */
typedef struct fsdp__link {
    int fd; /* -1: none */
    uint32_t rank;
    bool came;           /* hub: it is one of the star */
    bool closed;         /* it said goodbye */
    bool broken, shut;   /* sending failed; nothing more will be sent */
    uint64_t need;       /* hub: what it had no memory for, in its hello */
    fsdp__frame frame;   /* whose payload goes elsewhere: */
    uint64_t body_left;  /* so much is still to come */
    unsigned char *body; /* NULL: it is read and dropped */
    size_t n_in;
    unsigned char in[FSDP__HEAD_BYTES + FSDP__SENTENCE_BYTES];
    uint32_t n_out;
    fsdp__out out[FSDP__OUT_FRAMES];
} fsdp__link;

typedef enum fsdp__call_what { FSDP__CALL_GATHER = 0, FSDP__CALL_BROADCAST = 1 } fsdp__call_what;

/* What a rank is in. */
typedef struct fsdp__said {
    uint32_t what, root;
    uint64_t bytes;
    uint64_t need; /* memory that it did not get; 0: all is well */
    bool arrived, data_missing;
} fsdp__said;

/* The call this rank is in. */
typedef struct fsdp__own_call {
    uint64_t number, timeout_ns;
    fsdp__said said;
    const unsigned char *blob; /* this rank's */
    unsigned char *result;     /* put together here, and copied out when it is whole */
    uint64_t result_bytes;
    bool active, done;
    uint32_t refused_rank;
    uint64_t refused_need; /* 0: not refused */
} fsdp__own_call;

typedef struct fsdp__pending {
    int fd;
    uint32_t n;
    uint64_t deadline_ns;
    unsigned char hello[FSDP__HELLO_BYTES];
} fsdp__pending;

typedef struct fsdp__star {
    const fsdp_host_allocator *host;
    size_t bytes; /* of the one allocation that all of this lies in */
    uint32_t rank, world, n_links;
    fsdp_side_words words;
    void (*failed)(void *arg);
    void *failed_arg;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    pthread_t thread;
    int wake_fd;
    bool has_thread, closing, told;
    uint64_t close_deadline_ns;

    fsdp__link *links; /* hub: [r] is rank r's, [0] stays empty; member: [0] is the hub's */
    struct pollfd *polls;
    fsdp__pending *pending;
    uint64_t n_calls; /* this rank's */
    fsdp__own_call own;
    unsigned char
        *base[2]; /* room for small results; by turns, since one may still be on its way when the next comes */
    unsigned char *large[2];
    uint64_t large_bytes[2];

    /* hub: the call at hand */
    uint64_t number;
    fsdp__said *said;
    uint32_t n_arrived, n_data_missing;
    bool collecting, forming;
    uint64_t late_ns; /* while it forms: a rank's deadline is over, which was this long */

    /* failing */
    _Atomic int status; /* FSDP_OK until the sentence stands */
    bool failing, asking, words_due, abort_sent, fail_sent;
    fsdp_status first_status;
    uint64_t deadline_ns; /* hub: asking ends; member: nobody answers any more. 0: none */
    bool *answered;
    unsigned char *blobs; /* hub: of all ranks; member: its own */
    char first[FSDP__SENTENCE_BYTES], own_sentence[2][FSDP__SENTENCE_BYTES];
    char sentence[FSDP__ERROR_BYTES];
    char composed[FSDP__ERROR_BYTES]; /* hub: from words; member: what FAILED brings */
    const void **told_blobs;
} fsdp__star;

/* star.c */
uint64_t fsdp__star_after(uint64_t from_ns, uint64_t by_ns); /* their sum, or the end of time */
void fsdp__star_wake(fsdp__star *s);
static inline bool fsdp__star_is_hub(const fsdp__star *s) { return s->rank == 0; }

/* star_link.c: frames on one connection */
void fsdp__put_u32(unsigned char *to, uint32_t value);
void fsdp__put_u64(unsigned char *to, uint64_t value);
uint32_t fsdp__get_u32(const unsigned char *from);
uint64_t fsdp__get_u64(const unsigned char *from);
void fsdp__frame_put(unsigned char *to, const fsdp__frame *frame);
fsdp__frame fsdp__frame_get(const unsigned char *from);
/* frame.bytes of payload: first_bytes from first, copied, then the rest from body, which stays valid until it is sent.
 * Sends what goes without blocking. */
void fsdp__link_send(fsdp__star *s, fsdp__link *link, fsdp__frame frame, const void *first, size_t first_bytes,
                     const void *body);
void fsdp__link_flush(fsdp__star *s, fsdp__link *link);
/* Nothing that is still to be sent may use memory of the caller's any more. */
void fsdp__link_drop_bodies(fsdp__link *link);
void fsdp__link_receive(fsdp__star *s, fsdp__link *link);
void fsdp__link_close(fsdp__link *link);
void fsdp__link_open(fsdp__link *link, int fd, uint32_t rank);

/* Where a payload goes. */
typedef enum fsdp__where { FSDP__WHERE_BAD, FSDP__WHERE_INSIDE, FSDP__WHERE_BODY } fsdp__where;

/* star_hub.c, star_member.c: is this frame one that may come now, and where does its payload go; then, the frame is whole */
fsdp__where fsdp__hub_expects(fsdp__star *s, fsdp__link *link, const fsdp__frame *frame, unsigned char **out_body);
void fsdp__hub_takes(fsdp__star *s, fsdp__link *link, const fsdp__frame *frame, const unsigned char *payload);
fsdp__where fsdp__member_expects(fsdp__star *s, fsdp__link *link, const fsdp__frame *frame, unsigned char **out_body);
void fsdp__member_takes(fsdp__star *s, fsdp__link *link, const fsdp__frame *frame, const unsigned char *payload);
/* The connection ended: reason in words. */
void fsdp__hub_loses(fsdp__star *s, fsdp__link *link, const char *reason);
void fsdp__member_loses(fsdp__star *s, const char *reason);
void fsdp__hub_arrives(fsdp__star *s, uint32_t rank, const fsdp__said *said, const unsigned char *blob);
void fsdp__hub_late(fsdp__star *s, const fsdp__said *said, uint64_t number, uint64_t timeout_ns);
void fsdp__member_late(fsdp__star *s);
void fsdp__member_without_hub(fsdp__star *s); /* a call needs a hub that has said goodbye */

/* star_fail.c */
void fsdp__star_describe(const fsdp__said *said, uint64_t number, char *text, size_t bytes);
bool fsdp__star_is_failure(uint32_t status); /* one of fsdp_status, and no FSDP_OK */
/* The hub's way from a first failure to the sentence that stays. */
void fsdp__hub_fails(fsdp__star *s, fsdp_status status, const char *sentence);
/* From now on check fails. */
void fsdp__star_publish(fsdp__star *s, fsdp_status status, const char *sentence);
/* The table's fail; without the lock. */
void fsdp__star_fail(fsdp__star *s, fsdp_status status, const char *sentence);
fsdp_status fsdp__star_check(fsdp__star *s); /* the table's check; with or without the lock */
/* What is due by now, for the star's thread: words, sentences, the callback. Lets go of the lock. */
void fsdp__star_tend(fsdp__star *s);

/* star_call.c */
fsdp_status fsdp__star_call(fsdp__star *s, fsdp__said said, const void *mine, void *all, uint64_t timeout_ns);

/* star_thread.c */
fsdp_status fsdp__star_start_thread(fsdp__star *s);
void fsdp__star_stop_thread(fsdp__star *s); /* says goodbye first */

/* star_address.c */
typedef struct fsdp__place {
    char text[FSDP_ADDRESS_BYTES + 16]; /* "host:port", for sentences */
} fsdp__place;
/* Errors: ARG: "@" without a name, or with one that is longer than a Unix socket's. */
fsdp_status fsdp__place_check(const fsdp_launch *launch);
fsdp__place fsdp__place_of(const fsdp_launch *launch);
void fsdp__errno_words(int error, char *text, size_t bytes);
/* A socket that listens at launch's place. Retries while the port is taken, up to deadline_ns and 2 s. */
fsdp_status fsdp__place_listen(const fsdp_launch *launch, uint64_t deadline_ns, int *out_listener);
/* One round over the addresses that launch's place has; -1: none answers, *out_why says why. */
int fsdp__place_connect(const fsdp_launch *launch, uint64_t deadline_ns, char *out_why, size_t why_bytes);
void fsdp__socket_tune(int fd); /* no delay; a machine that is gone is noticed */
bool fsdp__wait_for(int fd, short events, uint64_t deadline_ns);

/* The hello: magic 8, nonce 8, version 4, world 4, rank 4, 4 of nothing, need 8. The answer: magic 8, code 4, version 4,
 * world 4, 20 of nothing. These places stay in every version. */
#define FSDP__HELLO_MAGIC "fsdpstar"
enum { FSDP__HELLO_VERSION = 1 };
typedef enum fsdp__answer {
    FSDP__ANSWER_WELCOME = 1,
    FSDP__ANSWER_LATER,   /* that rank is here already: perhaps it is the next star's */
    FSDP__ANSWER_VERSION, /* from here on it cannot get better */
    FSDP__ANSWER_WORLD,
    FSDP__ANSWER_RANK
} fsdp__answer;

/* star_door.c: hub, before the thread: from a listener to a connection of every rank. Takes the listener. */
fsdp_status fsdp__star_form(fsdp__star *s, const fsdp_launch *launch, int listener, uint64_t timeout_ns);
/* star_join.c: member: a connection to a hub whose star is complete. need: bytes of memory that this rank lacks, 0: none;
 * then it fails, as on every rank, once all have come. Takes no memory. */
fsdp_status fsdp__star_join(const fsdp_launch *launch, uint64_t need, uint64_t timeout_ns, int *out_fd);

#endif
