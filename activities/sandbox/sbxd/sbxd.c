/* sbxd: first process of a sandbox. Runs commands for the host, once per key, and answers for them again.
 *
 * Owns the command's process group, its time-out, its capped output and the journal of results. Promises: a key runs at
 * most once; an answer comes by the deadline plus two seconds; no output makes it grow; as process 1 it needs no child
 * of its own to live, and reaps whatever is left to it. The folder it is given is reachable for root alone, so nothing
 * that an agent runs can write a result. Called by activities/sandbox/channel.py over the unix socket `s` in that folder.
 *
 * One request and one answer per connection. A request is a line and its payload:
 *   RUN key uid gid timeout_ms cap n_shell n_cwd n_env n_command, then shell, cwd, env (NUL-ended strings), command
 *   ASK key | KILL | PING
 * Answers: `new` | `known` and the result (see command.c); `unknown`; `killed <left>`; `pong`; `bad`.
 *
 *   sbxd <folder> <lease seconds>     ends by itself when no request came for the lease. 0: never.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "command.h"
#include "kernel.h"

enum { MAX_REQUEST = 1 << 20, MAX_FDS = 640 };

struct client {
    int fd, waiting;
    char key[KEY], *in, *out;
    const char *verb;
    size_t n_in, n_out, sent;
    struct client *next;
};

static struct client *clients;
const char *folder;

static void set_out(struct client *c, const char *verb, const char *result, size_t n) {
    size_t n_verb = strlen(verb);
    c->out = must(malloc(n_verb + n));
    memcpy(c->out, verb, n_verb);
    if (n) memcpy(c->out + n_verb, result, n);
    c->n_out = n_verb + n;
    c->waiting = 0;
}

void on_finished(const char *key, const char *result, size_t n) {
    for (struct client *c = clients; c; c = c->next)
        if (c->waiting && !strcmp(c->key, key)) set_out(c, c->verb, result, n);
}

static void handle(struct client *c, char *payload, size_t n_payload) {
    char verb[8], key[KEY] = "";
    unsigned uid = 0, gid = 0;
    long timeout_ms = 0;
    size_t cap = 0, n[4] = {0};
    int fields = sscanf(c->in, "%7s %64s %u %u %ld %zu %zu %zu %zu %zu", verb, key, &uid, &gid, &timeout_ms, &cap, &n[0],
                        &n[1], &n[2], &n[3]);
    if (fields < 1) {
        set_out(c, "bad\n", NULL, 0);
        return;
    }
    if (!strcmp(verb, "PING")) {
        set_out(c, "pong\n", NULL, 0);
        return;
    }
    if (!strcmp(verb, "KILL")) {
        char text[32];
        snprintf(text, sizeof text, "killed %d\n", kill_all());
        set_out(c, text, NULL, 0);
        return;
    }
    if (fields < 2 || key[strspn(key, "0123456789abcdef")]) {
        set_out(c, "bad\n", NULL, 0);
        return;
    }
    strcpy(c->key, key);
    size_t size = 0;
    char *known = result_of(key, &size);
    if (known) {
        set_out(c, "known\n", known, size);
        free(known);
        return;
    }
    if (is_running(key)) {
        c->verb = "known\n";
        c->waiting = 1;
        return;
    }
    if (strcmp(verb, "RUN")) {
        set_out(c, "unknown\n", NULL, 0);
        return;
    }
    if (fields != 10 || n[0] + n[1] + n[2] + n[3] != n_payload || cap > MAX_REQUEST) {
        set_out(c, "bad\n", NULL, 0);
        return;
    }
    char *shell = must(strndup(payload, n[0])), *cwd = must(strndup(payload + n[0], n[1]));
    char *command = must(strndup(payload + n[0] + n[1] + n[2], n[3])), *env = must(malloc(n[2] + 1));
    memcpy(env, payload + n[0] + n[1], n[2]);
    env[n[2]] = 0;
    start(&(struct request){key, shell, cwd, env, command, n[2], cap, uid, gid, timeout_ms});
    free(shell);
    free(cwd);
    free(command);
    free(env);
    c->verb = "new\n";
    c->waiting = 1;
}

/* 0 when the client is done with. */
static int receive(struct client *c) {
    ssize_t n = read(c->fd, c->in + c->n_in, MAX_REQUEST - c->n_in);
    if (n < 0) return errno == EAGAIN || errno == EINTR;
    if (n == 0) return 0;
    if (c->waiting || c->out) return 1;
    c->n_in += n;
    c->in[c->n_in] = 0;
    char *end = memchr(c->in, '\n', c->n_in);
    if (!end) return c->n_in < 512;
    size_t want = 0, sizes[4] = {0};
    if (sscanf(c->in, "RUN %*s %*s %*s %*s %*s %zu %zu %zu %zu", &sizes[0], &sizes[1], &sizes[2], &sizes[3]) == 4)
        for (int i = 0; i < 4; i++) {
            if (sizes[i] > MAX_REQUEST) return 0;
            want += sizes[i];
        }
    size_t have = c->n_in - (end + 1 - c->in);
    if (have < want) return c->n_in < MAX_REQUEST;
    handle(c, end + 1, have);
    return 1;
}

static int send_more(struct client *c) {
    ssize_t n = send(c->fd, c->out + c->sent, c->n_out - c->sent, MSG_NOSIGNAL);
    if (n < 0) return errno == EAGAIN || errno == EINTR;
    c->sent += n;
    return c->sent < c->n_out;
}

static void accept_client(int listener) {
    int fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) return;
    struct client *c = must(calloc(1, sizeof *c));
    c->fd = fd;
    c->in = must(malloc(MAX_REQUEST + 1));
    c->next = clients;
    clients = c;
}

static void forget_clients(void) {
    for (struct client **at = &clients; *at;) {
        struct client *c = *at;
        if (c->fd >= 0) {
            at = &c->next;
            continue;
        }
        *at = c->next;
        free(c->in);
        free(c->out);
        free(c);
    }
}

static int listen_in(const char *path) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (strlen(path) + 3 > sizeof address.sun_path) return -1;
    sprintf(address.sun_path, "%s/s", path);
    unlink(address.sun_path);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0 || bind(fd, (struct sockaddr *)&address, sizeof address) || listen(fd, 64)) return -1;
    /* The folder is closed to the agent from the inside and to other users from the outside. */
    chmod(address.sun_path, 0666);
    return fd;
}

int main(int argc, char **argv) {
    /* Its SIGKILL to everybody must never leave a sandbox: anywhere but as process 1 it refuses to run. */
    if (argc != 3 || getpid() != 1) return 64;
    folder = argv[1];
    int64_t lease_ms = atoll(argv[2]) * 1000, heard = now_ms();
    sigset_t child_ended;
    sigemptyset(&child_ended);
    sigaddset(&child_ended, SIGCHLD);
    sigprocmask(SIG_BLOCK, &child_ended, NULL);
    int signals = signalfd(-1, &child_ended, SFD_NONBLOCK | SFD_CLOEXEC), listener = listen_in(folder);
    if (listener < 0 || signals < 0) return 71;
    for (;;) {
        struct pollfd fds[MAX_FDS] = {{listener, POLLIN, 0}, {signals, POLLIN, 0}};
        int outputs[MAX_FDS / 2], running, n = 2;
        int64_t now = now_ms(), wait = advance_all(now, &running);
        int64_t left = heard + lease_ms - now;
        if (lease_ms && !running && left <= 0) return 0;
        if (lease_ms && !running && left < wait) wait = left;
        for (int i = 0, all = output_fds(outputs, MAX_FDS / 2); i < all; i++)
            fds[n++] = (struct pollfd){outputs[i], POLLIN, 0};
        for (struct client *c = clients; c && n < MAX_FDS; c = c->next)
            fds[n++] = (struct pollfd){c->fd, c->out ? POLLOUT : POLLIN, 0};
        poll(fds, n, wait < 1 ? 1 : wait < 60000 ? (int)wait : 60000);
        if (fds[1].revents) {
            struct signalfd_siginfo info;
            while (read(signals, &info, sizeof info) > 0) continue;
        }
        reap();
        for (int i = 2; i < n; i++) {
            if (!fds[i].revents) continue;
            drain_fd(fds[i].fd);
            for (struct client *c = clients; c; c = c->next)
                if (c->fd == fds[i].fd && !(c->out ? send_more(c) : receive(c))) {
                    close(c->fd);
                    c->fd = -1;
                }
        }
        forget_clients();
        if (fds[0].revents) {
            heard = now_ms();
            accept_client(listener);
        }
    }
}
