// An OpenAI-like server whose timing is known exactly: the ruler that the benchmarks measure clients with.
//
// It answers chat and text completions, streamed and plain, at the moments its flags say, and notes for every
// request when its last byte arrived (by the kernel's receive stamp: a ruler that is busy writing chunks must not make
// the client look late) and when the first and the last chunk were handed to the kernel, on CLOCK_MONOTONIC, which is
// also Python's time.monotonic() and time.perf_counter(). It generates no text, checks no model name and speaks no TLS.
//
// One thread: epoll for sockets, a heap of due moments, and a wait with nanosecond timeout between the two.
//
//   --port N        listen on 127.0.0.1:N; 0 (default) takes a free one. The first line on stdout says which.
//   --ttft-s X      request read to first chunk            (default 0.05)
//   --itl-s X       chunk to chunk                         (default 0.01)
//   --chunks N      content chunks of a streamed answer    (default 32)
//   --plain-s X     request read to plain answer           (default 0.05)
//   --stall-at-s X  freeze once, X after the first request (default: never); SIGUSR1 freezes at once
//   --stall-s X     how long a freeze lasts                (default 2)
//   --life-s X      leave after X, whatever happens        (default 600)
//
//   GET /v1/models, /health    as vLLM answers them
//   GET /log                   one CSV line a finished request: id,read_ns,first_ns,last_ns,chunks,streamed
//   GET /stats                 requests begun and finished, connections, CPU seconds of this server
//   GET /reset                 forget log and counts, and arm the stall again
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define NS 1000000000LL
#define MAX_HEAD 65536

typedef struct {
    char id[48];                            // the client's x-request-id
    int64_t read_ns, first_ns, last_ns;
    int chunks, streamed;
} Record;

typedef struct {
    int fd;
    char *in, *out;
    size_t in_len, in_cap, out_len, out_pos, out_cap;
    int64_t heard_ns;                       // when the bytes read last arrived
    size_t head_len, body_len;              // of the request now arriving; head_len 0: its head is not complete
    int answering, watching_writes, is_chat, wants_usage;
    int64_t due_ns;                         // when the next chunk is to be written
    int heap_slot;                          // -1: nothing due
    Record now;                             // the request being answered
} Conn;

static struct {
    int64_t ttft_ns, itl_ns, plain_ns, stall_at_ns, stall_ns, life_ns;
    int port, chunks;
} flags = {50 * NS / 1000, 10 * NS / 1000, 50 * NS / 1000, -1, 2 * NS, 600 * NS, 0, 32};

static Record *records;
static size_t record_count, record_cap;
static long begun, connections, open_connections, peak_connections;
static int64_t first_request_ns;
static int stalled, epoll_fd;
static volatile sig_atomic_t stall_asked;

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * NS + t.tv_nsec;
}

static void *grown(void *block, size_t bytes) {
    block = realloc(block, bytes);
    if (!block) { perror("timed_server"); exit(1); }
    return block;
}

// ---- due moments: a binary heap of connections, earliest first ------------------------------------------------

static Conn **heap;
static int heap_len, heap_cap;

static void heap_put(int slot, Conn *c) { heap[slot] = c; c->heap_slot = slot; }

static void heap_rise(int slot) {
    Conn *c = heap[slot];
    for (int parent; slot > 0 && heap[parent = (slot - 1) / 2]->due_ns > c->due_ns; slot = parent) heap_put(slot, heap[parent]);
    heap_put(slot, c);
}

static void heap_sink(int slot) {
    Conn *c = heap[slot];
    for (int child; (child = 2 * slot + 1) < heap_len; slot = child) {
        if (child + 1 < heap_len && heap[child + 1]->due_ns < heap[child]->due_ns) child++;
        if (heap[child]->due_ns >= c->due_ns) break;
        heap_put(slot, heap[child]);
    }
    heap_put(slot, c);
}

static void heap_push(Conn *c) {
    if (heap_len == heap_cap) heap = grown(heap, (size_t)(heap_cap = heap_cap ? 2 * heap_cap : 1024) * sizeof *heap);
    heap_put(heap_len++, c);
    heap_rise(heap_len - 1);
}

static void heap_remove(Conn *c) {
    int slot = c->heap_slot;
    if (slot < 0) return;
    c->heap_slot = -1;
    Conn *last = heap[--heap_len];
    if (last == c) return;
    heap_put(slot, last);
    heap_rise(slot);
    heap_sink(last->heap_slot);
}

// ---- writing ---------------------------------------------------------------------------------------------------

static void put(Conn *c, const char *bytes, size_t n) {
    if (c->out_len + n > c->out_cap) c->out = grown(c->out, c->out_cap = 2 * (c->out_len + n));
    memcpy(c->out + c->out_len, bytes, n);
    c->out_len += n;
}

__attribute__((format(printf, 2, 3))) static void putf(Conn *c, const char *format, ...) {
    char text[1024];
    va_list args;
    va_start(args, format);
    int n = vsnprintf(text, sizeof text, format, args);
    va_end(args);
    put(c, text, (size_t)n < sizeof text ? (size_t)n : sizeof text - 1);
}

static void watch(Conn *c, int writes) {
    if (c->watching_writes == writes) return;
    c->watching_writes = writes;
    struct epoll_event e = {.events = writes ? EPOLLIN | EPOLLOUT : EPOLLIN, .data.ptr = c};
    epoll_ctl(epoll_fd, EPOLL_CTL_MOD, c->fd, &e);
}

// Sends what waits in the buffer; what the socket does not take goes when it can. Returns -1 when the client is gone.
static int flush(Conn *c) {
    while (c->out_pos < c->out_len) {
        ssize_t n = send(c->fd, c->out + c->out_pos, c->out_len - c->out_pos, MSG_NOSIGNAL);
        if (n < 0 && errno == EAGAIN) { watch(c, 1); return 0; }
        if (n < 0) return -1;
        c->out_pos += (size_t)n;
    }
    c->out_pos = c->out_len = 0;
    watch(c, 0);
    return 0;
}

static void put_event(Conn *c, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void put_event(Conn *c, const char *format, ...) {
    char text[512];
    va_list args;
    va_start(args, format);
    int n = vsnprintf(text, sizeof text, format, args);
    va_end(args);
    putf(c, "%x\r\ndata: %s\n\n\r\n", n + 8, text);                     // 8: "data: " and the blank line
}

static void put_chunk(Conn *c) {
    static const char *words[] = {" the", " of", " and", " to", " in", " is", " that", " for"};
    const char *word = words[c->now.chunks % 8];
    int first = c->now.chunks == 0, last = ++c->now.chunks == flags.chunks;
    if (first) putf(c, "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n");
    const char *reason = last ? "\"length\"" : "null";
    if (c->is_chat)
        put_event(c, "{\"id\":\"chatcmpl-0123456789abcdef\",\"object\":\"chat.completion.chunk\",\"created\":1700000000,\"model\":\"sim\","
                     "\"choices\":[{\"index\":0,\"delta\":{%s\"content\":\"%s\"},\"logprobs\":null,\"finish_reason\":%s}]}",
                  first ? "\"role\":\"assistant\"," : "", word, reason);
    else
        put_event(c, "{\"id\":\"cmpl-0123456789abcdef\",\"object\":\"text_completion\",\"created\":1700000000,\"model\":\"sim\","
                     "\"choices\":[{\"index\":0,\"text\":\"%s\",\"logprobs\":null,\"finish_reason\":%s}]}", word, reason);
    if (!last) return;
    if (c->wants_usage)
        put_event(c, "{\"id\":\"cmpl-0123456789abcdef\",\"object\":\"%s\",\"created\":1700000000,\"model\":\"sim\",\"choices\":[],"
                     "\"usage\":{\"prompt_tokens\":16,\"completion_tokens\":%d,\"total_tokens\":%d}}",
                  c->is_chat ? "chat.completion.chunk" : "text_completion", flags.chunks, 16 + flags.chunks);
    put_event(c, "[DONE]");
    putf(c, "0\r\n\r\n");
}

static void put_response(Conn *c, const char *status, const char *type, const char *body, size_t n) {
    putf(c, "HTTP/1.1 %s\r\ncontent-type: %s\r\ncontent-length: %zu\r\n\r\n", status, type, n);
    put(c, body, n);
}

static void put_plain_answer(Conn *c) {
    char body[512];
    int n = snprintf(body, sizeof body, "{\"id\":\"cmpl-0123456789abcdef\",\"object\":\"%s\",\"created\":1700000000,\"model\":\"sim\","
                     "\"choices\":[{\"index\":0,%s,\"logprobs\":null,\"finish_reason\":\"length\"}],"
                     "\"usage\":{\"prompt_tokens\":16,\"completion_tokens\":%d,\"total_tokens\":%d}}",
                     c->is_chat ? "chat.completion" : "text_completion",
                     c->is_chat ? "\"message\":{\"role\":\"assistant\",\"content\":\"the of and to\"}" : "\"text\":\"the of and to\"",
                     flags.chunks, 16 + flags.chunks);
    c->now.chunks = flags.chunks;
    put_response(c, "200 OK", "application/json", body, (size_t)n);
}

// ---- answering -------------------------------------------------------------------------------------------------

static int take_requests(Conn *c);

static int finish(Conn *c) {
    if (record_count == record_cap) records = grown(records, (record_cap = record_cap ? 2 * record_cap : 65536) * sizeof *records);
    records[record_count++] = c->now;
    c->answering = 0;
    return take_requests(c);                                            // a pipelined one may be waiting
}

// Writes what is due on this connection. The stamp is taken just before the write: the client cannot see the bytes earlier.
static int write_due(Conn *c) {
    for (;;) {
        if (c->now.streamed) put_chunk(c); else put_plain_answer(c);
        c->now.last_ns = now_ns();
        if (!c->now.first_ns) c->now.first_ns = c->now.last_ns;
        if (flush(c) < 0) return -1;
        if (c->now.chunks == flags.chunks) return finish(c);
        c->due_ns += flags.itl_ns;                                      // absolute: a late chunk does not delay the next
        if (c->due_ns > now_ns()) { heap_push(c); return 0; }
    }
}

static void begin_answer(Conn *c, const char *head, const char *body) {
    memset(&c->now, 0, sizeof c->now);
    c->now.read_ns = c->heard_ns;
    begun++;
    if (!first_request_ns) first_request_ns = c->now.read_ns;
    const char *id = strcasestr(head, "\r\nx-request-id:");             // head ends with a zero byte here
    if (id) {
        id += strlen("\r\nx-request-id:");
        id += strspn(id, " ");
        size_t n = strcspn(id, "\r,");
        memcpy(c->now.id, id, n < sizeof c->now.id ? n : sizeof c->now.id - 1);
    }
    const char *stream = memmem(body, c->body_len, "\"stream\"", 8);    // inside a prompt the quotes would be escaped
    c->now.streamed = stream && stream[8 + strspn(stream + 8, ": ")] == 't';
    c->wants_usage = memmem(body, c->body_len, "\"include_usage\"", 15) != NULL;
    c->answering = 1;
    c->due_ns = now_ns() + (c->now.streamed ? flags.ttft_ns : flags.plain_ns);
}

static void put_log(Conn *c) {
    char *text = grown(NULL, record_count * 160 + 1);
    size_t n = 0;
    for (Record *r = records; r < records + record_count; r++)
        n += (size_t)sprintf(text + n, "%s,%lld,%lld,%lld,%d,%d\n", r->id, (long long)r->read_ns, (long long)r->first_ns,
                             (long long)r->last_ns, r->chunks, r->streamed);
    put_response(c, "200 OK", "text/csv", text, n);
    free(text);
}

static void put_stats(Conn *c) {
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    double cpu_s = (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) + (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec) / 1e6;
    char body[256];
    int n = snprintf(body, sizeof body, "{\"begun\":%ld,\"finished\":%zu,\"connections\":%ld,\"peak_connections\":%ld,\"cpu_s\":%.6f}",
                     begun, record_count, connections, peak_connections, cpu_s);
    put_response(c, "200 OK", "application/json", body, (size_t)n);
}

static void reset(void) {
    record_count = 0;
    begun = connections = 0;
    peak_connections = open_connections;
    first_request_ns = 0;
    stalled = 0;
}

static void answer_get(Conn *c, const char *path) {
    static const char models[] = "{\"object\":\"list\",\"data\":[{\"id\":\"sim\",\"object\":\"model\",\"created\":1700000000,"
                                 "\"owned_by\":\"timed_server\",\"max_model_len\":32768}]}";
    if (!strncmp(path, "/log ", 5)) put_log(c);
    else if (!strncmp(path, "/stats ", 7)) put_stats(c);
    else if (!strncmp(path, "/reset ", 7)) { reset(); put_response(c, "200 OK", "application/json", "{}", 2); }
    else if (!strncmp(path, "/health ", 8)) put_response(c, "200 OK", "text/plain", "", 0);
    else if (!strncmp(path, "/v1/models ", 11)) put_response(c, "200 OK", "application/json", models, strlen(models));
    else put_response(c, "404 Not Found", "application/json", "{}", 2);
}

// Finds the head of the next request once; a large body is then only counted until it is whole.
static int find_head(Conn *c) {
    char *end = memmem(c->in, c->in_len, "\r\n\r\n", 4);
    if (!end) return c->in_len > MAX_HEAD ? -1 : 0;
    end[2] = 0;                                                         // string functions stop inside the head
    const char *length = strcasestr(c->in, "\r\ncontent-length:");
    c->body_len = length ? strtoul(length + strlen("\r\ncontent-length:"), NULL, 10) : 0;
    c->head_len = (size_t)(end - c->in) + 4;
    return 0;
}

// Takes the next request from the buffer when it is whole and the last one is answered. Returns -1 to close.
static int take_requests(Conn *c) {
    while (!c->answering) {
        if (!c->head_len && find_head(c) < 0) return -1;
        if (!c->head_len || c->in_len < c->head_len + c->body_len) return 0;
        int is_post = !strncmp(c->in, "POST ", 5);
        const char *path = c->in + (is_post ? 5 : 4);
        c->is_chat = !strncmp(path, "/v1/chat/completions ", 21);
        if (is_post && (c->is_chat || !strncmp(path, "/v1/completions ", 16))) begin_answer(c, c->in, c->in + c->head_len);
        else answer_get(c, is_post ? "" : path);
        size_t taken = c->head_len + c->body_len;
        c->in_len -= taken;
        memmove(c->in, c->in + taken, c->in_len + 1);                   // with the zero byte behind
        c->head_len = c->body_len = 0;
        if (!c->answering) { if (flush(c) < 0) return -1; continue; }
        if (c->due_ns <= now_ns()) return write_due(c);                  // a delay of zero needs no timer
        heap_push(c);
    }
    return 0;
}

// ---- sockets ---------------------------------------------------------------------------------------------------

static int listen_on(int port) {
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0), on = 1;
    struct sockaddr_in here = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    socklen_t size = sizeof here;
    if (bind(fd, (struct sockaddr *)&here, size) || listen(fd, 4096) || getsockname(fd, (struct sockaddr *)&here, &size)) {
        perror("timed_server: listen");
        exit(1);
    }
    printf("%d\n", ntohs(here.sin_port));
    fflush(stdout);
    return fd;
}

static void accept_all(int listener) {
    for (int fd, on = 1; (fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0;) {
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        setsockopt(fd, SOL_SOCKET, SO_TIMESTAMPNS, &on, sizeof on);
        Conn *c = grown(NULL, sizeof *c);
        memset(c, 0, sizeof *c);
        c->fd = fd;
        c->heap_slot = -1;
        connections++;
        if (++open_connections > peak_connections) peak_connections = open_connections;
        struct epoll_event e = {.events = EPOLLIN, .data.ptr = c};
        epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &e);
    }
}

static void drop(Conn *c) {
    heap_remove(c);
    close(c->fd);
    open_connections--;
    free(c->in);
    free(c->out);
    free(c);
}

// The kernel's stamp of what was just read, on our clock; now, when it carries none or the wall clock has been set.
static int64_t stamp_ns(struct msghdr *message) {
    struct timespec stamp, wall;
    int64_t now = now_ns();
    clock_gettime(CLOCK_REALTIME, &wall);
    for (struct cmsghdr *m = CMSG_FIRSTHDR(message); m; m = CMSG_NXTHDR(message, m)) {
        if (m->cmsg_level != SOL_SOCKET || m->cmsg_type != SCM_TIMESTAMPNS) continue;
        memcpy(&stamp, CMSG_DATA(m), sizeof stamp);
        int64_t ago = (wall.tv_sec - stamp.tv_sec) * NS + wall.tv_nsec - stamp.tv_nsec;
        return ago < 0 || ago > NS ? now : now - ago;
    }
    return now;
}

// Reads all that is there. Returns -1 when the client is gone.
static int read_all(Conn *c) {
    for (;;) {
        if (c->in_len + 1 >= c->in_cap) c->in = grown(c->in, c->in_cap = c->in_cap ? 2 * c->in_cap : 4096);
        char control[CMSG_SPACE(sizeof(struct timespec))];
        struct iovec room = {c->in + c->in_len, c->in_cap - c->in_len - 1};
        struct msghdr message = {.msg_iov = &room, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
        ssize_t n = recvmsg(c->fd, &message, 0);
        if (n < 0 && errno == EAGAIN) return take_requests(c);
        if (n <= 0) return -1;
        c->heard_ns = stamp_ns(&message);
        c->in_len += (size_t)n;
        c->in[c->in_len] = 0;
    }
}

// ---- time ------------------------------------------------------------------------------------------------------

static void ask_stall(int signal) { (void)signal; stall_asked = 1; }

// Everything stands still, and what was under way goes on afterwards as if no time had passed, as a frozen engine does.
static void stall_when_asked(void) {
    if (flags.stall_at_ns >= 0 && !stalled && first_request_ns && now_ns() >= first_request_ns + flags.stall_at_ns) stall_asked = 1;
    if (!stall_asked) return;
    stall_asked = 0;
    stalled = 1;
    struct timespec left = {flags.stall_ns / NS, flags.stall_ns % NS};
    while (nanosleep(&left, &left) < 0 && errno == EINTR) {}
    for (int i = 0; i < heap_len; i++) heap[i]->due_ns += flags.stall_ns;   // all by the same: the order stays
}

static int64_t sleep_ns(void) {
    int64_t now = now_ns(), until = now + NS;                           // at least once a second: life limit
    if (heap_len && heap[0]->due_ns < until) until = heap[0]->due_ns;
    if (flags.stall_at_ns >= 0 && !stalled && first_request_ns && first_request_ns + flags.stall_at_ns < until)
        until = first_request_ns + flags.stall_at_ns;
    return until > now ? until - now : 0;
}

static void read_flags(int argc, char **argv) {
    for (int i = 1; i + 1 < argc; i += 2) {
        double value = atof(argv[i + 1]);
        if (!strcmp(argv[i], "--port")) flags.port = (int)value;
        else if (!strcmp(argv[i], "--chunks")) flags.chunks = value < 1 ? 1 : (int)value;
        else if (!strcmp(argv[i], "--ttft-s")) flags.ttft_ns = (int64_t)(value * 1e9);
        else if (!strcmp(argv[i], "--itl-s")) flags.itl_ns = (int64_t)(value * 1e9);
        else if (!strcmp(argv[i], "--plain-s")) flags.plain_ns = (int64_t)(value * 1e9);
        else if (!strcmp(argv[i], "--stall-at-s")) flags.stall_at_ns = (int64_t)(value * 1e9);
        else if (!strcmp(argv[i], "--stall-s")) flags.stall_ns = (int64_t)(value * 1e9);
        else if (!strcmp(argv[i], "--life-s")) flags.life_ns = (int64_t)(value * 1e9);
        else { fprintf(stderr, "timed_server: unknown flag %s\n", argv[i]); exit(2); }
    }
}

int main(int argc, char **argv) {
    read_flags(argc, argv);
    signal(SIGPIPE, SIG_IGN);
    signal(SIGUSR1, ask_stall);
    struct rlimit files = {65536, 65536};
    setrlimit(RLIMIT_NOFILE, &files);
    int listener = listen_on(flags.port);
    epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    struct epoll_event events[512], e = {.events = EPOLLIN, .data.ptr = NULL};
    epoll_ctl(epoll_fd, EPOLL_CTL_ADD, listener, &e);
    for (int64_t end = now_ns() + flags.life_ns; now_ns() < end;) {
        stall_when_asked();
        while (heap_len && heap[0]->due_ns <= now_ns()) {
            Conn *c = heap[0];
            heap_remove(c);
            if (write_due(c) < 0) drop(c);
        }
        int64_t wait = sleep_ns();
        struct timespec timeout = {wait / NS, wait % NS};
        int n = epoll_pwait2(epoll_fd, events, 512, &timeout, NULL);
        for (int i = 0; i < n; i++) {
            Conn *c = events[i].data.ptr;
            if (!c) { accept_all(listener); continue; }
            int gone = events[i].events & EPOLLOUT ? flush(c) < 0 : 0;
            if (!gone && events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) gone = read_all(c) < 0;
            if (gone) drop(c);
        }
    }
    return 0;
}
