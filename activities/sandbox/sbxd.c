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
 * Answers: `new` | `known` and the result; `unknown`; `killed <left>`; `pong`; `bad`.
 * A result is the line
 *   exit signal timed_out spawn_errno ms total n_head n_tail oom_kills pids_hits pids pids_max full
 * and its first n_head and last n_tail bytes of output. `full` is `-` or a comma list of full file systems.
 *
 *   sbxd <folder> <lease seconds>     ends by itself when no request came for the lease. 0: never.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { MAX_REQUEST = 1 << 20, MAX_FDS = 640, TERM_MS = 500, KILL_MS = 1000, LAST_MS = 300, TICK_MS = 10, KEY = 65 };

struct process { pid_t pid; unsigned long long started; };
struct list { struct process *items; int n; };
enum phase { RUNNING, TERMINATING, KILLING, LAST, DONE };

struct op {
    char key[KEY];
    enum phase phase;
    pid_t pid; /* 0 once reaped */
    int status, spawn_errno, timed_out, out; /* out: read end of its output, -1 at end of file */
    int64_t started, ended, due;
    struct list before;
    long oom_before, hits_before;
    char *head, *ring; /* first and last `half` bytes of output */
    size_t half, n_head;
    uint64_t total;
    char *kept; /* the result, only where the journal could not take it */
    size_t n_kept;
    struct op *next;
};

struct client {
    int fd, waiting;
    char key[KEY], *in, *out;
    const char *verb;
    size_t n_in, n_out, sent;
    struct client *next;
};

static struct op *ops;
static struct client *clients;
static const char *folder;

static int64_t now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

static void *must(void *p) {
    if (!p) _exit(70);
    return p;
}

/* --- evidence: what the kernel counted against this sandbox (cgroup v2 first, then v1) --- */

static long counter(const char *const paths[], const char *name) {
    char text[4096], *at;
    for (int i = 0; paths[i]; i++) {
        int fd = open(paths[i], O_RDONLY | O_CLOEXEC);
        if (fd < 0) continue;
        ssize_t n = read(fd, text, sizeof text - 1);
        close(fd);
        if (n <= 0) continue;
        text[n] = 0;
        if (!*name) return strncmp(text, "max", 3) ? atol(text) : -1;
        for (at = text; at; at = strchr(at, '\n') ? strchr(at, '\n') + 1 : NULL)
            if (!strncmp(at, name, strlen(name)) && at[strlen(name)] == ' ') return atol(at + strlen(name));
    }
    return -1;
}
#define CG "/sys/fs/cgroup/"
static long oom_kills(void) {
    return counter((const char *const[]){CG "memory.events", CG "memory/memory.oom_control", NULL}, "oom_kill");
}
static long pids_hits(void) {
    return counter((const char *const[]){CG "pids.events", CG "pids/pids.events", NULL}, "max");
}
static long pids_now(void) {
    return counter((const char *const[]){CG "pids.current", CG "pids/pids.current", NULL}, "");
}
static long pids_max(void) {
    return counter((const char *const[]){CG "pids.max", CG "pids/pids.max", NULL}, "");
}

static void full_file_systems(char *text, size_t size) {
    static const char *const dirs[] = {"/work", "/data", "/tmp", NULL};
    *text = 0;
    for (int i = 0; dirs[i]; i++) {
        struct statvfs s;
        if (statvfs(dirs[i], &s) || (s.f_flag & ST_RDONLY) || (s.f_bavail && s.f_ffree)) continue;
        if (*text) strncat(text, ",", size - strlen(text) - 1);
        strncat(text, dirs[i], size - strlen(text) - 1);
    }
    if (!*text) strncpy(text, "-", size);
}

/* --- processes --- */

static int alive(const char *pid, unsigned long long *started) {
    char path[300], text[1024], *at;
    snprintf(path, sizeof path, "/proc/%s/stat", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 0;
    ssize_t n = read(fd, text, sizeof text - 1);
    close(fd);
    if (n <= 0) return 0;
    text[n] = 0;
    if (!(at = strrchr(text, ')')) || at[2] == 'Z' || at[2] == 'X') return 0;
    at += 2;
    for (int field = 3; field < 22; field++) {
        if (!(at = strchr(at, ' '))) return 0;
        at++;
    }
    *started = strtoull(at, NULL, 10);
    return 1;
}

static struct list processes(void) {
    struct list list = {NULL, 0};
    DIR *dir = opendir("/proc");
    struct dirent *entry;
    while (dir && (entry = readdir(dir))) {
        struct process one = {atoi(entry->d_name), 0};
        if (one.pid <= 1 || !alive(entry->d_name, &one.started)) continue;
        if (list.n % 64 == 0) list.items = must(realloc(list.items, (list.n + 64) * sizeof *list.items));
        list.items[list.n++] = one;
    }
    if (dir) closedir(dir);
    return list;
}

/* SIGKILL to every process that began after the command did, wherever it fled to. How many there were. */
static int kill_newer(struct op *op) {
    struct list now = processes();
    int killed = 0;
    for (int i = 0; i < now.n; i++) {
        int old = 0;
        for (int j = 0; j < op->before.n && !old; j++)
            old = now.items[i].pid == op->before.items[j].pid && now.items[i].started == op->before.items[j].started;
        if (!old && ++killed) kill(now.items[i].pid, SIGKILL);
    }
    free(now.items);
    return killed;
}

static void reap(void) {
    int status;
    pid_t pid;
    while ((pid = waitpid(-1, &status, WNOHANG)) > 0)
        for (struct op *op = ops; op; op = op->next)
            if (op->pid == pid) {
                op->pid = 0;
                op->status = status;
                op->ended = now_ms();
            }
}

static int kill_all(void) {
    int left = 0;
    for (int64_t until = now_ms() + 1500; now_ms() < until; usleep(2000)) {
        kill(-1, SIGKILL); /* from process 1: every other process of the sandbox, at once */
        reap();
        struct list now = processes();
        free(now.items);
        if (!(left = now.n)) break;
    }
    return left;
}

/* --- output and results --- */

static void keep(struct op *op, const char *bytes, size_t n) {
    size_t to_head = op->half - op->n_head < n ? op->half - op->n_head : n;
    memcpy(op->head + op->n_head, bytes, to_head);
    op->n_head += to_head;
    for (size_t i = to_head; i < n;) {
        size_t at = (op->total + i - op->half) % op->half;
        size_t room = op->half - at < n - i ? op->half - at : n - i;
        memcpy(op->ring + at, bytes + i, room);
        i += room;
    }
    op->total += n;
}

/* What there is now, at most `limit` bytes. After the command's end it is thrown away, so that what the command left
 * running neither blocks nor dies of a closed pipe. */
static void drain(struct op *op, size_t limit) {
    static char buffer[65536];
    while (op->out >= 0 && limit > 0) {
        ssize_t n = read(op->out, buffer, sizeof buffer);
        if (n > 0 && op->phase != DONE) keep(op, buffer, n);
        if (n > 0) limit -= (size_t)n < limit ? (size_t)n : limit;
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && errno == EAGAIN) return;
        if (n <= 0) {
            close(op->out);
            op->out = -1;
        }
    }
}

static int path_of(char *path, const char *key, const char *suffix) {
    return snprintf(path, 4096, "%s/%s%s", folder, key, suffix);
}

static void set_out(struct client *c, const char *verb, const char *result, size_t n) {
    size_t n_verb = strlen(verb);
    c->out = must(malloc(n_verb + n));
    memcpy(c->out, verb, n_verb);
    if (n) memcpy(c->out + n_verb, result, n);
    c->n_out = n_verb + n;
    c->waiting = 0;
}

static char *read_result(const char *key, size_t *n) {
    char path[4096];
    struct stat s;
    path_of(path, key, "");
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return NULL;
    char *text = NULL;
    if (!fstat(fd, &s)) {
        text = must(malloc(s.st_size + 1));
        *n = 0;
        for (ssize_t got; (off_t)*n < s.st_size && (got = read(fd, text + *n, s.st_size - *n)) > 0;) *n += got;
    }
    close(fd);
    return text;
}

static int write_result(const char *key, const char *text, size_t n) {
    char temporary[4096], path[4096];
    path_of(temporary, key, ".part");
    path_of(path, key, "");
    int fd = open(temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (fd < 0) return 0;
    size_t done = 0;
    for (ssize_t put; done < n && (put = write(fd, text + done, n - done)) > 0;) done += put;
    return !close(fd) && done == n && !rename(temporary, path);
}

static void finish(struct op *op) {
    char full[64], line[512];
    if (op->pid) op->ended = now_ms();
    drain(op, 1 << 20);
    full_file_systems(full, sizeof full);
    long oom = oom_kills() - op->oom_before, hits = pids_hits() - op->hits_before;
    size_t n_tail = op->total - op->n_head < op->half ? op->total - op->n_head : op->half;
    size_t first = op->total - op->n_head > op->half ? (op->total - op->half) % op->half : 0;
    int code = !op->pid && !op->spawn_errno && WIFEXITED(op->status) ? WEXITSTATUS(op->status) : -1;
    int signal = !op->pid && !op->spawn_errno && WIFSIGNALED(op->status) ? WTERMSIG(op->status) : 0;
    int n = snprintf(line, sizeof line, "%d %d %d %d %lld %llu %zu %zu %ld %ld %ld %ld %s\n", code, signal,
                     op->timed_out, op->spawn_errno, (long long)(op->ended - op->started),
                     (unsigned long long)op->total, op->n_head, n_tail, oom, hits, pids_now(), pids_max(), full);
    char *result = must(malloc(n + op->n_head + n_tail));
    memcpy(result, line, n);
    memcpy(result + n, op->head, op->n_head);
    for (size_t i = 0; i < n_tail; i++) result[n + op->n_head + i] = op->ring[(first + i) % op->half];
    size_t size = n + op->n_head + n_tail;
    for (struct client *c = clients; c; c = c->next)
        if (c->waiting && !strcmp(c->key, op->key)) set_out(c, c->verb, result, size);
    if (write_result(op->key, result, size)) {
        free(result);
    } else {
        op->kept = result;
        op->n_kept = size;
    }
    free(op->head);
    free(op->ring);
    free(op->before.items);
    op->head = op->ring = NULL;
    op->before.items = NULL;
    op->phase = DONE;
    op->pid = 0;
}

/* The next move of a command that ended or is past its deadline. Milliseconds until it wants to be looked at again. */
static int64_t advance(struct op *op, int64_t now) {
    if (op->phase == DONE) return INT32_MAX;
    if (op->phase == RUNNING) {
        if (!op->pid) return finish(op), INT32_MAX;
        if (now < op->due) return op->due - now;
        op->timed_out = 1;
        kill(-op->pid, SIGTERM);
        op->phase = TERMINATING;
        op->due = now + TERM_MS;
    }
    if (op->phase == TERMINATING) {
        if (op->pid && now < op->due) return TICK_MS;
        op->phase = KILLING;
        op->due = now + KILL_MS;
    }
    if (op->pid) kill(-op->pid, SIGKILL);
    int left = kill_newer(op);
    if (!op->pid && !left) return finish(op), INT32_MAX;
    if (now < op->due) return TICK_MS;
    if (op->phase == LAST) return finish(op), INT32_MAX;
    kill(-1, SIGKILL);
    op->phase = LAST;
    op->due = now + LAST_MS;
    return TICK_MS;
}

/* --- starting --- */

static void child(const char *shell, const char *cwd, char **env, char *command, unsigned uid, unsigned gid, int out) {
    sigset_t none;
    sigemptyset(&none);
    for (int i = 1; i < 32; i++) signal(i, SIG_DFL);
    sigprocmask(SIG_SETMASK, &none, NULL);
    setsid();
    int null = open("/dev/null", O_RDONLY);
    if (null >= 0) dup2(null, 0);
    dup2(out, 1);
    dup2(out, 2);
    close_range(3, ~0U, 0);
    umask(022);
    int score = open("/proc/self/oom_score_adj", O_WRONLY);
    if (score >= 0) { /* the kernel shall take the command, not process 1 */
        if (write(score, "1000", 4) < 0) dprintf(2, "sbxd: oom_score_adj: %s\n", strerror(errno));
        close(score);
    }
    if (uid && (setgroups(0, NULL) || setresgid(gid, gid, gid) || setresuid(uid, uid, uid))) _exit(126);
    if (chdir(cwd) && chdir("/")) _exit(126);
    execve(shell, (char *[]){"sh", "-c", command, NULL}, env);
    dprintf(2, "sbxd: %s: %s\n", shell, strerror(errno));
    _exit(errno == ENOENT ? 127 : 126);
}

static void start(const char *key, unsigned uid, unsigned gid, long timeout_ms, size_t cap, char *shell, char *cwd,
                  char *env, size_t n_env, char *command) {
    struct op *op = must(calloc(1, sizeof *op));
    int out[2] = {-1, -1}, n = 0;
    strcpy(op->key, key);
    op->half = cap / 2 ? cap / 2 : 1;
    op->head = must(malloc(op->half));
    op->ring = must(malloc(op->half));
    op->before = processes();
    op->oom_before = oom_kills();
    op->hits_before = pids_hits();
    char **strings = must(calloc(n_env / 2 + 2, sizeof *strings));
    for (size_t i = 0; i + 1 < n_env; i += strlen(env + i) + 1) strings[n++] = env + i;
    op->started = now_ms();
    op->due = op->started + timeout_ms;
    if (pipe2(out, O_CLOEXEC)) {
        op->spawn_errno = errno;
    } else if ((op->pid = fork()) == 0) {
        child(shell, cwd, strings, command, uid, gid, out[1]);
    } else {
        if (op->pid < 0) op->spawn_errno = errno;
        close(out[1]);
        fcntl(out[0], F_SETFL, O_NONBLOCK);
    }
    if (op->spawn_errno) {
        op->pid = 0;
        op->ended = op->started;
    }
    op->out = out[0];
    op->next = ops;
    ops = op;
    free(strings);
}

/* --- requests --- */

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
    for (struct op *op = ops; op; op = op->next)
        if (!strcmp(op->key, key) && op->kept) {
            set_out(c, "known\n", op->kept, op->n_kept);
            return;
        }
    char *known = read_result(key, &size);
    if (known) {
        set_out(c, "known\n", known, size);
        free(known);
        return;
    }
    for (struct op *op = ops; op; op = op->next)
        if (!strcmp(op->key, key)) {
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
    start(key, uid, gid, timeout_ms, cap, shell, cwd, env, n[2], command);
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

static void forget_ops(void) {
    for (struct op **at = &ops; *at;) {
        struct op *op = *at;
        if (op->phase != DONE || op->out >= 0 || op->kept) {
            at = &op->next;
            continue;
        }
        *at = op->next;
        free(op);
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
    if (argc != 3) return 64;
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
        int n = 2, running = 0;
        int64_t now = now_ms(), wait = 60000;
        for (struct op *op = ops; op; op = op->next) {
            int64_t next = advance(op, now);
            if (next < wait) wait = next;
            running |= op->phase != DONE;
        }
        forget_ops();
        if (lease_ms && !running && now - heard > lease_ms) return 0;
        for (struct op *op = ops; op && n < MAX_FDS; op = op->next)
            if (op->out >= 0) fds[n++] = (struct pollfd){op->out, POLLIN, 0};
        for (struct client *c = clients; c && n < MAX_FDS; c = c->next)
            fds[n++] = (struct pollfd){c->fd, c->out ? POLLOUT : POLLIN, 0};
        poll(fds, n, wait < 1 ? 1 : (int)wait);
        if (fds[1].revents) {
            struct signalfd_siginfo info;
            while (read(signals, &info, sizeof info) > 0) continue;
        }
        reap();
        for (int i = 2; i < n; i++) {
            if (!fds[i].revents) continue;
            for (struct op *op = ops; op; op = op->next)
                if (op->out == fds[i].fd) drain(op, 1 << 20);
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
