/* Faults of a machine for one process. Load it with LD_PRELOAD.

   CLOCK_JUMPS  seconds: every 0.3 s, the time of day jumps: by so much ahead, so much back, and to the true time
   STALE_CALL   a function below: its call number STALE_NUMBER with STALE_PATH in the path fails with ESTALE, as on a network file system */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define REAL(name)                                                                                                                         \
    static __typeof__(&name) real;                                                                                                         \
    if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

/* -- clocks ---------------------------------------------------------------------------------------------------------------------- */

static long offset(void) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    const char *jump = getenv("CLOCK_JUMPS");
    struct timespec now;
    if (!jump || real(CLOCK_MONOTONIC, &now)) return 0;
    long place = (now.tv_sec * 10 + now.tv_nsec / 100000000) / 3 % 3;
    return place == 0 ? 0 : place == 1 ? atol(jump) : -atol(jump);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    REAL(clock_gettime);
    int result = real(clock, now);
    if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += offset();
    return result;
}

int gettimeofday(struct timeval *now, void *zone) {
    REAL(gettimeofday);
    int result = real(now, zone);
    if (result == 0) now->tv_sec += offset();
    return result;
}

time_t time(time_t *now) {
    REAL(time);
    time_t result = real(NULL) + offset();
    if (now) *now = result;
    return result;
}

/* -- stale file handles ------------------------------------------------------------------------------------------------------------ */

static int is_stale(const char *call, const char *path) {
    static int count;
    const char *wanted = getenv("STALE_CALL"), *part = getenv("STALE_PATH"), *number = getenv("STALE_NUMBER");
    if (!wanted || !part || !number || strcmp(call, wanted) || !strstr(path, part) || ++count != atoi(number)) return 0;
    errno = ESTALE;
    return 1;
}

static int is_stale_file(const char *call, int file) {
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    path[length < 0 ? 0 : length] = 0;
    return is_stale(call, path);
}

#define OPEN(name)                                                                                                                         \
    int name(const char *path, int flags, ...) {                                                                                           \
        REAL(name);                                                                                                                        \
        va_list more;                                                                                                                      \
        va_start(more, flags);                                                                                                             \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, mode_t) : 0;                                                            \
        va_end(more);                                                                                                                      \
        return is_stale(flags & O_CREAT ? "create" : "open", path) ? -1 : real(path, flags, mode);                                         \
    }
OPEN(open)
OPEN(open64)

ssize_t write(int file, const void *data, size_t size) {
    REAL(write);
    return is_stale_file("write", file) ? -1 : real(file, data, size);
}

int fsync(int file) {
    REAL(fsync);
    return is_stale_file("fsync", file) ? -1 : real(file);
}

int rename(const char *old, const char *new) {
    REAL(rename);
    return is_stale("rename", old) ? -1 : real(old, new);
}

int mkdir(const char *name, mode_t mode) {
    REAL(mkdir);
    return is_stale("mkdir", name) ? -1 : real(name, mode);
}
