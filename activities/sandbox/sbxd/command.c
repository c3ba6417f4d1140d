/* See command.h.
 *
 * A result is the line
 *   exit signal timed_out spawn_errno ms total n_head n_tail oom_kills pids_hits pids pids_max full
 * and its first n_head and last n_tail bytes of output. `full` is `-` or a comma list of full file systems.
 */
#define _GNU_SOURCE
#include "command.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kernel.h"

enum { TERM_MS = 500, KILL_MS = 1000, LAST_MS = 300, TICK_MS = 10 };

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

static struct op *ops;

void reap(void) {
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

int kill_all(void) {
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
    on_finished(op->key, result, size);
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
    int left = kill_newer(&op->before);
    if (!op->pid && !left) return finish(op), INT32_MAX;
    if (now < op->due) return TICK_MS;
    if (op->phase == LAST) return finish(op), INT32_MAX;
    kill(-1, SIGKILL);
    op->phase = LAST;
    op->due = now + LAST_MS;
    return TICK_MS;
}

static void child(const struct request *r, char **env, int out) {
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
    if (r->uid && (setgroups(0, NULL) || setresgid(r->gid, r->gid, r->gid) || setresuid(r->uid, r->uid, r->uid)))
        _exit(126);
    if (chdir(r->cwd) && chdir("/")) _exit(126);
    execve(r->shell, (char *[]){"sh", "-c", r->command, NULL}, env);
    dprintf(2, "sbxd: %s: %s\n", r->shell, strerror(errno));
    _exit(errno == ENOENT ? 127 : 126);
}

void start(const struct request *r) {
    struct op *op = must(calloc(1, sizeof *op));
    int out[2] = {-1, -1}, n = 0;
    snprintf(op->key, KEY, "%s", r->key);
    op->half = r->cap / 2 ? r->cap / 2 : 1;
    op->head = must(malloc(op->half));
    op->ring = must(malloc(op->half));
    op->before = processes();
    op->oom_before = oom_kills();
    op->hits_before = pids_hits();
    char **strings = must(calloc(r->n_env + 2, sizeof *strings));
    for (size_t i = 0; i < r->n_env; i += strlen(r->env + i) + 1) strings[n++] = r->env + i;
    op->started = now_ms();
    op->due = op->started + r->timeout_ms;
    if (pipe2(out, O_CLOEXEC)) {
        op->spawn_errno = errno;
    } else if ((op->pid = fork()) == 0) {
        child(r, strings, out[1]);
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

static struct op *find(const char *key) {
    struct op *op = ops;
    while (op && strcmp(op->key, key)) op = op->next;
    return op;
}

int is_running(const char *key) {
    struct op *op = find(key);
    return op && op->phase != DONE;
}

char *result_of(const char *key, size_t *n) {
    struct op *op = find(key);
    if (!op || !op->kept) return read_result(key, n);
    *n = op->n_kept;
    return memcpy(must(malloc(op->n_kept)), op->kept, op->n_kept);
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

int64_t advance_all(int64_t now, int *running) {
    int64_t wait = INT32_MAX;
    *running = 0;
    for (struct op *op = ops; op; op = op->next) {
        int64_t next = advance(op, now);
        if (next < wait) wait = next;
        *running |= op->phase != DONE;
    }
    forget_ops();
    return wait;
}

int output_fds(int *fds, int room) {
    int n = 0;
    for (struct op *op = ops; op && n < room; op = op->next)
        if (op->out >= 0) fds[n++] = op->out;
    return n;
}

void drain_fd(int fd) {
    for (struct op *op = ops; op; op = op->next)
        if (op->out == fd) drain(op, 1 << 20);
}
