/* What a launchd job sees of libSystem: launch_activate_socket, over descriptors named in FAKE_LAUNCHD_SOCKETS.
   "name=fd[,fd]" are the sockets of this job; without the variable the process is no job of launchd's. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int activated;

int launch_activate_socket(const char *name, int **fds, size_t *count)
{
    const char *sockets = getenv("FAKE_LAUNCHD_SOCKETS");
    size_t length = strlen(name);
    if (sockets == NULL)
        return ESRCH;
    if (strncmp(sockets, name, length) != 0 || sockets[length] != '=')
        return ENOENT;
    if (activated)
        return EALREADY;
    activated = 1;
    *fds = malloc(16 * sizeof(int));
    *count = 0;
    for (const char *at = sockets + length; *at != '\0' && *count < 16; at += strcspn(at, ",")) {
        at++;
        (*fds)[(*count)++] = atoi(at);
        if (strchr(at, ',') == NULL)
            break;
    }
    return 0;
}
