/* What the kernel knows of this sandbox: its counters, its full file systems, its processes. */
#ifndef KERNEL_H
#define KERNEL_H
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

struct process {
    pid_t pid;
    unsigned long long started;
};
struct list {
    struct process *items;
    int n;
};

int64_t now_ms(void);
void *must(void *p); /* p; ends sbxd where memory ended */

long oom_kills(void); /* each -1 where the kernel does not tell */
long pids_hits(void);
long pids_now(void);
long pids_max(void);
void full_file_systems(char *text, size_t size); /* `-`, or a comma list */

struct list processes(void);                /* all but process 1 and the dead; the caller frees items */
int kill_newer(const struct list *before);  /* SIGKILL to all that are not in the list; how many */

#endif
