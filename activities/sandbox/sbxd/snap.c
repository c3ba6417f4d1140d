/* snap: keeps what a task's setup wrote, and writes it again into another sandbox.
 *
 *   snap save <archive> <most bytes> <folder>...     snap load <archive>
 *
 * Promises that what `load` makes is what `save` saw: content, names, modes, owners, times to the nanosecond, hard and
 * symbolic links. Where it can't promise that (a process is left running, a socket, an extended attribute, a hole, too many
 * bytes, something outside the folders) `save` says why and ends with 3. An archive that was cut short is never loaded
 * for a whole one: it has an end mark, and `load` fails, with 97. For one machine: numbers are in its own order. Run as root by
 * activities/sandbox/preparation.py, before any agent.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

#include "kernel.h"

enum { REFUSED = 3, FAILED = 97, BUFFER = 1 << 16 };
static const char MAGIC[8] = "RSNAP 1", END[8] = "RSEND 1";

struct entry { /* then path, link (n_link: a symbolic link's text, or the first name of a hard link), content */
    uint32_t mode, uid, gid, hard, n_path, n_link;
    uint64_t size;
    struct timespec times[2];
};
struct inode {
    dev_t dev;
    ino_t ino;
    char *path;
};

static FILE *archive;
static char buffer[BUFFER];
static uint64_t written, most;
static struct inode *inodes;
static size_t n_inodes;

static void stop(int code, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    printf("snap: ");
    vprintf(format, arguments);
    va_end(arguments);
    printf("\n");
    fflush(stdout);
    _exit(code);
}

static void failed(const char *path) { stop(FAILED, "%s: %s", path, strerror(errno)); }

/* --- save ------------------------------------------------------------------------------------------------------- */

static void put(const void *bytes, size_t n) {
    if ((written += n) > most) stop(REFUSED, "more than %llu bytes", (unsigned long long)most);
    if (fwrite(bytes, 1, n, archive) != n) failed("archive");
}

static void put_content(const char *path, uint64_t size) {
    int fd = open(path, O_RDONLY | O_NOFOLLOW | O_NOATIME | O_CLOEXEC);
    if (fd < 0) failed(path);
    while (size > 0) {
        ssize_t n = read(fd, buffer, size < BUFFER ? size : BUFFER);
        if (n <= 0) stop(REFUSED, "%s changed while it was read", path);
        put(buffer, n);
        size -= n;
    }
    close(fd);
}

/* The first name of a file that has several, NULL where this is it. */
static const char *first_name(const struct stat *s, const char *path) {
    if (S_ISDIR(s->st_mode) || s->st_nlink < 2) return NULL;
    for (size_t i = 0; i < n_inodes; i++)
        if (inodes[i].dev == s->st_dev && inodes[i].ino == s->st_ino) return inodes[i].path;
    if (n_inodes % 256 == 0) inodes = must(realloc(inodes, (n_inodes + 256) * sizeof *inodes));
    inodes[n_inodes++] = (struct inode){s->st_dev, s->st_ino, must(strdup(path))};
    return NULL;
}

static int named(const struct dirent *entry) { return strcmp(entry->d_name, ".") && strcmp(entry->d_name, ".."); }

static void save(const char *path, dev_t device) {
    struct stat s;
    char link[PATH_MAX];
    if (lstat(path, &s)) failed(path);
    if (device && s.st_dev != device) stop(REFUSED, "%s is another file system", path);
    if (!S_ISDIR(s.st_mode) && !S_ISREG(s.st_mode) && !S_ISLNK(s.st_mode) && !S_ISFIFO(s.st_mode))
        stop(REFUSED, "%s is no file, folder, link or pipe", path);
    if (llistxattr(path, NULL, 0) > 0) stop(REFUSED, "%s has extended attributes", path);
    if (S_ISREG(s.st_mode) && (uint64_t)s.st_blocks * 512 < (uint64_t)s.st_size) stop(REFUSED, "%s has holes", path);
    const char *first = first_name(&s, path), *text = first;
    if (!first && S_ISLNK(s.st_mode)) {
        ssize_t n = readlink(path, link, sizeof link - 1);
        if (n < 0) failed(path);
        link[n] = 0;
        text = link;
    }
    struct entry entry;
    memset(&entry, 0, sizeof entry); /* also what lies between its fields */
    entry.mode = s.st_mode;
    entry.uid = s.st_uid;
    entry.gid = s.st_gid;
    entry.hard = first != NULL;
    entry.n_path = strlen(path);
    entry.n_link = text ? strlen(text) : 0;
    entry.size = S_ISREG(s.st_mode) && !first ? s.st_size : 0;
    entry.times[0] = s.st_atim;
    entry.times[1] = s.st_mtim;
    put(MAGIC, sizeof MAGIC);
    put(&entry, sizeof entry);
    put(path, entry.n_path);
    put(text, entry.n_link);
    if (entry.size) put_content(path, entry.size);
    if (!S_ISDIR(s.st_mode)) return;
    struct dirent **names;
    int n = scandir(path, &names, named, alphasort);
    if (n < 0) failed(path);
    for (int i = 0; i < n; i++) {
        char child[PATH_MAX];
        if (snprintf(child, sizeof child, "%s/%s", path, names[i]->d_name) >= (int)sizeof child)
            stop(REFUSED, "a path below %s is too long", path);
        save(child, s.st_dev);
        free(names[i]);
    }
    free(names);
}

/* What a setup may have changed beyond the folders: the root file system is read-only, /dev is not. */
static void only_devices(const char *folder) {
    static const char *const links[] = {"core", "fd", "ptmx", "stderr", "stdin", "stdout", NULL};
    static const char *const folders[] = {"mqueue", "pts", "shm", NULL};
    struct dirent **names;
    int n = scandir(folder, &names, named, alphasort);
    for (int i = 0; i < n; i++) {
        char path[PATH_MAX];
        struct stat s;
        snprintf(path, sizeof path, "%s/%s", folder, names[i]->d_name);
        if (lstat(path, &s) || S_ISCHR(s.st_mode)) continue;
        const char *const *known = S_ISLNK(s.st_mode) ? links : folders;
        if (S_ISDIR(s.st_mode) || S_ISLNK(s.st_mode))
            while (*known && strcmp(*known, names[i]->d_name)) known++;
        else
            known = NULL;
        if (!known || !*known) stop(REFUSED, "%s is outside the folders", path);
        if (S_ISDIR(s.st_mode) && strcmp(names[i]->d_name, "pts")) only_devices(path);
    }
}

static int save_all(int argc, char **argv) {
    struct list running = processes();
    if (running.n > 1) stop(REFUSED, "%d processes are left running", running.n - 1); /* one is this */
    only_devices("/dev");
    most = strtoull(argv[3], NULL, 10);
    archive = fopen(argv[2], "w");
    if (!archive) failed(argv[2]);
    for (int i = 4; i < argc; i++) save(argv[i], 0);
    put(END, sizeof END);
    /* The host may be another user, to whom the sandboxes' folder belongs. */
    if (fflush(archive) || fchmod(fileno(archive), 0666) || fclose(archive)) failed(argv[2]);
    printf("%llu\n", (unsigned long long)written);
    return 0;
}

/* --- load ------------------------------------------------------------------------------------------------------- */

static void get(void *bytes, size_t n) {
    if (fread(bytes, 1, n, archive) != n) stop(FAILED, "the archive was cut short");
}

static char *get_text(size_t n) {
    if (n >= PATH_MAX) stop(FAILED, "the archive is broken");
    char *text = must(malloc(n + 1));
    get(text, n);
    text[n] = 0;
    return text;
}

static void get_content(const char *path, uint64_t size) {
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd < 0) failed(path);
    while (size > 0) {
        size_t n = size < BUFFER ? size : BUFFER;
        get(buffer, n);
        if (write(fd, buffer, n) != (ssize_t)n) failed(path);
        size -= n;
    }
    close(fd);
}

static void load(const struct entry *entry, const char *path, const char *link_text) {
    if (entry->hard) {
        if (link(link_text, path)) failed(path);
        return;
    }
    switch (entry->mode & S_IFMT) {
    case S_IFDIR:
        if (mkdir(path, 0700) && errno != EEXIST) failed(path); /* the folders themselves are there */
        break;
    case S_IFLNK:
        if (symlink(link_text, path)) failed(path);
        break;
    case S_IFIFO:
        if (mkfifo(path, 0600)) failed(path);
        break;
    default:
        get_content(path, entry->size);
    }
    if (lchown(path, entry->uid, entry->gid)) failed(path);
    if (!S_ISLNK(entry->mode) && chmod(path, entry->mode & 07777)) failed(path);
}

static void set_times(const struct entry *entry, const char *path) {
    if (utimensat(AT_FDCWD, path, entry->times, AT_SYMLINK_NOFOLLOW)) failed(path);
}

static int load_all(char **argv) {
    struct entry *entries = NULL;
    char **paths = NULL, mark[8];
    size_t n = 0;
    archive = fopen(argv[2], "r");
    if (!archive) failed(argv[2]);
    umask(0);
    for (get(mark, sizeof mark); memcmp(mark, END, sizeof mark); get(mark, sizeof mark)) {
        if (memcmp(mark, MAGIC, sizeof mark)) stop(FAILED, "the archive is broken");
        if (n % 256 == 0) {
            entries = must(realloc(entries, (n + 256) * sizeof *entries));
            paths = must(realloc(paths, (n + 256) * sizeof *paths));
        }
        get(&entries[n], sizeof *entries);
        paths[n] = get_text(entries[n].n_path);
        char *text = get_text(entries[n].n_link);
        load(&entries[n], paths[n], text);
        free(text);
        n++;
    }
    /* Last, as every name in a folder changes the folder's own time; and from the end, for the folders above. */
    while (n-- > 0) set_times(&entries[n], paths[n]);
    printf("forked\n");
    return 0;
}

int main(int argc, char **argv) {
    if (argc > 4 && !strcmp(argv[1], "save")) return save_all(argc, argv);
    if (argc == 3 && !strcmp(argv[1], "load")) return load_all(argv);
    return 64;
}
