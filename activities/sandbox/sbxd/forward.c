/* forward: a port on the sandbox's loopback behind which is a unix socket, for programs that know TCP alone.
 *
 * Returns once it listens, and goes on in the background until the sandbox's processes are killed. Each connection has a
 * process of its own, which ends with either side. Root starts it: the socket is in a folder that nobody else reaches.
 *
 *   forward <port> <socket>     exit 1: it can't listen
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

enum { CHUNK = 1 << 16 };

/* 0 at the end of `from`, or where `to` takes nothing any more. */
static int pump(int from, int to) {
    static char data[CHUNK];
    ssize_t n = read(from, data, sizeof data);
    if (n <= 0) return n < 0 && errno == EINTR;
    for (ssize_t done = 0; done < n;) {
        ssize_t sent = write(to, data + done, n - done);
        if (sent < 0 && errno != EINTR) return 0;
        if (sent > 0) done += sent;
    }
    return 1;
}

static void serve(int near, const char *path) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    strncpy(address.sun_path, path, sizeof address.sun_path - 1);
    int far = socket(AF_UNIX, SOCK_STREAM, 0);
    if (far < 0 || connect(far, (struct sockaddr *)&address, sizeof address)) return;
    struct pollfd ends[2] = {{near, POLLIN, 0}, {far, POLLIN, 0}};
    while (ends[1].fd >= 0) {
        if (poll(ends, 2, -1) < 0 && errno != EINTR) return;
        if (ends[0].revents && !pump(near, far)) {
            /* The program has said all; what is on its way back still comes, unless it is gone. */
            shutdown(far, SHUT_WR);
            if (ends[0].revents & (POLLERR | POLLHUP)) return;
            ends[0].fd = -1;
        }
        if (ends[1].revents && !pump(far, near)) return;
    }
}

int main(int argc, char **argv) {
    if (argc != 3) return 2;
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(atoi(argv[1]))};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int one = 1, at = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    setsockopt(at, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (at < 0 || bind(at, (struct sockaddr *)&address, sizeof address) || listen(at, 64)) {
        perror("forward");
        return 1;
    }
    signal(SIGPIPE, SIG_IGN);
    signal(SIGCHLD, SIG_IGN);
    if (daemon(0, 0)) return 1;
    for (;;) {
        int near = accept(at, NULL, NULL);
        if (near < 0) {
            usleep(10000);
            continue;
        }
        if (!fork()) {
            serve(near, argv[2]);
            _exit(0);
        }
        close(near);
    }
}
