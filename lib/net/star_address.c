/* SPDX-License-Identifier: MIT */
/* Where rank 0 listens, as sockets: names and numbers, IPv4, IPv6, and Unix sockets without a file. */
#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "star_parts.h"

enum { BACKLOG = 4096 }; /* the kernel cuts it to its own limit */
#define ATTEMPT_NS (5000 * FSDP__MS)
#define TAKEN_NS   (2000 * FSDP__MS)

typedef union any_address {
    struct sockaddr any;
    struct sockaddr_in v4;
    struct sockaddr_in6 v6;
    struct sockaddr_un local;
} any_address;

void fsdp__errno_words(int error, char *text, size_t bytes)
{
    char buffer[96];
    snprintf(text, bytes, "%s", strerror_r(error, buffer, sizeof buffer)); /* GNU's */
}

fsdp__place fsdp__place_of(const fsdp_launch *launch)
{
    fsdp__place place;
    char *text = place.text;
    const size_t bytes = sizeof place.text;
    if (launch->address[0] == '@') snprintf(text, bytes, "%s", launch->address);
    else if (launch->address[0] == '\0') snprintf(text, bytes, "port %u", launch->port);
    else if (strchr(launch->address, ':') != NULL) snprintf(text, bytes, "[%s]:%u", launch->address, launch->port);
    else snprintf(text, bytes, "%s:%u", launch->address, launch->port);
    return place;
}

bool fsdp__wait_for(int fd, short events, uint64_t deadline_ns)
{
    struct pollfd one = {.fd = fd, .events = events};
    for (;;) {
        uint64_t now_ns = fsdp__now_ns(), left_ns = deadline_ns > now_ns ? deadline_ns - now_ns : 0;
        const struct timespec left = fsdp__timespec(left_ns);
        int n = ppoll(&one, 1, &left, NULL);
        if (n > 0) return true;
        if (n == 0 || errno != EINTR) return false;
    }
}

/* A peer whose machine lost its power, or its cable, ends within half a minute; one that is only stopped does not. */
void fsdp__socket_tune(int fd)
{
    const struct {
        int level, name, value;
    } options[] = {{IPPROTO_TCP, TCP_NODELAY, 1},   {SOL_SOCKET, SO_KEEPALIVE, 1},
                   {IPPROTO_TCP, TCP_KEEPIDLE, 10}, {IPPROTO_TCP, TCP_KEEPINTVL, 5},
                   {IPPROTO_TCP, TCP_KEEPCNT, 4},   {IPPROTO_TCP, TCP_USER_TIMEOUT, 30000}};
    for (size_t i = 0; i < sizeof options / sizeof *options; i++)
        (void)setsockopt(fd, options[i].level, options[i].name, &options[i].value, sizeof options[i].value);
}

static int new_socket(int family) { return socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0); }

/* "@name": the first byte of the address is 0, and nothing lies in any folder. */
static bool local_address(const char *name, any_address *out, socklen_t *out_bytes)
{
    size_t length = strlen(name); /* with the @ */
    memset(out, 0, sizeof *out);
    if (length < 2 || length > sizeof out->local.sun_path) return false;
    out->local.sun_family = AF_UNIX;
    memcpy(out->local.sun_path + 1, name + 1, length - 1);
    *out_bytes = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + length);
    return true;
}

fsdp_status fsdp__place_check(const fsdp_launch *launch)
{
    any_address address;
    socklen_t bytes;
    if (launch->address[0] != '@' || local_address(launch->address, &address, &bytes)) return FSDP_OK;
    size_t length = strlen(launch->address) - 1;
    if (length == 0) return fsdp__fail(FSDP_ERR_ARG, "side channel: the address is \"@\" with no name behind it");
    return fsdp__fail(
        FSDP_ERR_ARG,
        "side channel: the name behind the @ of the address is %zu bytes long, and a Unix socket's has at "
        "most %zu: \"%.32s...\"",
        length, sizeof address.local.sun_path - 1, launch->address);
}

static int resolve(const fsdp_launch *launch, int flags, struct addrinfo **out_list)
{
    char port[8];
    snprintf(port, sizeof port, "%u", launch->port);
    struct addrinfo hints = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM, .ai_flags = flags | AI_NUMERICSERV};
    return getaddrinfo(launch->address, port, &hints, out_list);
}

/* ---- Listening ---- */

/* A descriptor, or -1 and errno. */
static int listen_at(const any_address *address, socklen_t bytes)
{
    const int yes = 1, no = 0;
    int fd = new_socket(address->any.sa_family);
    if (fd < 0) return -1;
    /* A job that starts again at once finds its old connections in TIME_WAIT. */
    (void)setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    bool any_v6 = address->any.sa_family == AF_INET6 && IN6_IS_ADDR_UNSPECIFIED(&address->v6.sin6_addr);
    if (any_v6) (void)setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &no, sizeof no);
    if (bind(fd, &address->any, bytes) == 0 && listen(fd, BACKLOG) == 0) return fd;
    int error = errno;
    close(fd);
    errno = error;
    return -1;
}

/* Every address of this machine: IPv6's, which takes IPv4 as well, or IPv4's where there is no IPv6. */
static int listen_anywhere(uint16_t port)
{
    any_address v6 = {.v6 = {.sin6_family = AF_INET6, .sin6_port = htons(port), .sin6_addr = IN6ADDR_ANY_INIT}};
    any_address v4 = {.v4 = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr = {htonl(INADDR_ANY)}}};
    int fd = listen_at(&v6, sizeof v6.v6);
    if (fd >= 0 || errno == EADDRINUSE || errno == EACCES) return fd;
    return listen_at(&v4, sizeof v4.v4);
}

static int listen_once(const fsdp_launch *launch)
{
    any_address address;
    socklen_t bytes;
    if (launch->address[0] == '@') {
        if (local_address(launch->address, &address, &bytes)) return listen_at(&address, bytes);
        errno = ENAMETOOLONG;
        return -1;
    }
    /* A name may mean 127.0.1.1 here and something else on other machines: then anywhere. */
    struct addrinfo *list;
    if (resolve(launch, AI_NUMERICHOST, &list) != 0) return listen_anywhere(launch->port);
    memset(&address, 0, sizeof address);
    bytes = list->ai_addrlen;
    memcpy(&address, list->ai_addr, bytes < sizeof address ? bytes : sizeof address);
    freeaddrinfo(list);
    int fd = listen_at(&address, bytes);
    if (fd >= 0 || errno != EADDRNOTAVAIL) return fd;
    return listen_anywhere(launch->port); /* an address that a router or a container translates */
}

fsdp_status fsdp__place_listen(const fsdp_launch *launch, uint64_t deadline_ns, int *out_listener)
{
    /* The port may be taken for a moment: by a process that is ending, or by a connection out of this machine. */
    uint64_t until_ns = fsdp__now_ns() + TAKEN_NS;
    if (until_ns > deadline_ns) until_ns = deadline_ns;
    for (;;) {
        int fd = listen_once(launch), error = errno;
        if (fd >= 0) {
            *out_listener = fd;
            return FSDP_OK;
        }
        if (error == EADDRINUSE && fsdp__now_ns() < until_ns) {
            nanosleep(&(struct timespec){0, 20 * FSDP__MS}, NULL);
            continue;
        }
        char words[96];
        fsdp__errno_words(error, words, sizeof words);
        return fsdp__fail(FSDP_ERR_RANK_LOST, "side channel: rank 0 cannot listen at %s: %s%s%s",
                          fsdp__place_of(launch).text, words,
                          error == EADDRINUSE ? ": is another job there, or a second rank 0? " : "",
                          error != EADDRINUSE         ? ""
                          : launch->address[0] == '@' ? "Give each job an FSDP_NONCE of its own"
                                                      : "Give this one another MASTER_PORT");
    }
}

fsdp_status fsdp__star_listen(int *out_listener, uint16_t *out_port)
{
    FSDP_NEED(out_listener);
    FSDP_NEED(out_port);
    int fd = listen_anywhere(0);
    any_address address;
    socklen_t bytes = sizeof address;
    if (fd < 0 || getsockname(fd, &address.any, &bytes) != 0) {
        char words[96];
        fsdp__errno_words(errno, words, sizeof words);
        if (fd >= 0) close(fd);
        return fsdp__fail(FSDP_ERR_RANK_LOST, "side channel: rank 0 cannot listen on any port: %s", words);
    }
    *out_listener = fd;
    *out_port = ntohs(address.any.sa_family == AF_INET6 ? address.v6.sin6_port : address.v4.sin_port);
    return FSDP_OK;
}

/* ---- Connecting ---- */

/* Connected to itself: to a free port that happened to become its own. It would keep rank 0 from listening there. */
static bool is_itself(int fd)
{
    any_address mine, theirs;
    socklen_t mine_bytes = sizeof mine, theirs_bytes = sizeof theirs;
    memset(&mine, 0, sizeof mine);
    memset(&theirs, 0, sizeof theirs);
    return getsockname(fd, &mine.any, &mine_bytes) == 0 && getpeername(fd, &theirs.any, &theirs_bytes) == 0 &&
           mine.any.sa_family != AF_UNIX && mine_bytes == theirs_bytes && memcmp(&mine, &theirs, mine_bytes) == 0;
}

/* A connected descriptor, or -1 and errno. */
static int connect_to(const struct sockaddr *address, socklen_t bytes, uint64_t deadline_ns)
{
    int fd = new_socket(address->sa_family);
    if (fd < 0) return -1;
    int error = connect(fd, address, bytes) == 0 ? 0 : errno;
    if (error == EINPROGRESS || error == EINTR) {
        socklen_t error_bytes = sizeof error;
        if (!fsdp__wait_for(fd, POLLOUT, deadline_ns)) error = ETIMEDOUT;
        else if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &error_bytes) != 0) error = errno;
    }
    if (error == 0 && is_itself(fd)) error = ECONNREFUSED;
    if (error == 0) return fd;
    close(fd);
    errno = error;
    return -1;
}

int fsdp__place_connect(const fsdp_launch *launch, uint64_t deadline_ns, char *out_why, size_t why_bytes)
{
    any_address local;
    socklen_t local_bytes;
    struct addrinfo one = {0}, *list = &one, *found = NULL;
    if (launch->address[0] == '@') {
        if (!local_address(launch->address, &local, &local_bytes)) {
            fsdp__errno_words(ENAMETOOLONG, out_why, why_bytes);
            return -1;
        }
        one.ai_addr = &local.any;
        one.ai_addrlen = local_bytes;
    } else {
        int error = resolve(launch, 0, &found);
        if (error != 0) {
            snprintf(out_why, why_bytes, "%s", gai_strerror(error));
            return -1;
        }
        list = found;
    }
    int fd = -1, error = 0;
    for (; list != NULL && fd < 0; list = list->ai_next) {
        uint64_t until_ns = fsdp__now_ns() + ATTEMPT_NS;
        fd = connect_to(list->ai_addr, list->ai_addrlen, until_ns < deadline_ns ? until_ns : deadline_ns);
        if (fd < 0) error = errno;
    }
    if (found != NULL) freeaddrinfo(found);
    if (fd < 0) fsdp__errno_words(error, out_why, why_bytes);
    else fsdp__socket_tune(fd);
    return fd;
}
