/* Commands: started once per key, ended by their time-out, answered for by their result. */
#ifndef COMMAND_H
#define COMMAND_H
#include <stddef.h>
#include <stdint.h>

enum { KEY = 65 };

struct op; /* one command that runs, or whose output is still held open by what it left running */

struct request {
    const char *key, *shell, *cwd;
    char *env, *command; /* env: n_env bytes of NUL-ended strings */
    size_t n_env, cap;   /* cap: bytes of output to keep */
    unsigned uid, gid;
    long timeout_ms;
};

extern const char *folder; /* of the journal */

void start(const struct request *request);
int is_running(const char *key);
char *result_of(const char *key, size_t *n); /* the caller frees; NULL where there is none */
int64_t advance_all(int64_t now, int *running); /* milliseconds until it wants to be called again */
int output_fds(int *fds, int room);
void drain_fd(int fd);
void reap(void);
int kill_all(void); /* every process but this one; how many are left */

void on_finished(const char *key, const char *result, size_t n); /* defined by the caller of this module */

#endif
