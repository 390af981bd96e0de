/* Faults of a machine for one process. Load it with LD_PRELOAD.

   CLOCK_JUMPS  seconds: every 0.3 s, the time of day jumps: by so much ahead, so much back, and to the true time
   STALE_CALL   a function below: STALE_TIMES calls (default 1) from number STALE_NUMBER on, with STALE_PATH in the path, fail with ESTALE,
                as on a network file system
   LATE_PATH    a process with RANK=LATE_RANK cannot open paths with this part until LATE_SECONDS after the first attempt, as on a host
                that cached the entries of a folder
   SLOW_PATH    an fsync of a path with this part takes SLOW_MILLISECONDS longer */
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
    const char *wanted = getenv("STALE_CALL"), *part = getenv("STALE_PATH");
    const char *number = getenv("STALE_NUMBER"), *times = getenv("STALE_TIMES");
    if (!wanted || !part || !number || strcmp(call, wanted) || !strstr(path, part)) return 0;
    int since = ++count - atoi(number);
    if (since < 0 || since >= (times ? atoi(times) : 1)) return 0;
    errno = ESTALE;
    return 1;
}

static const char *path_of(int file) {
    static _Thread_local char path[PATH_MAX];
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    path[length < 0 ? 0 : length] = 0;
    return path;
}

static int is_stale_file(const char *call, int file) { return getenv("STALE_CALL") && is_stale(call, path_of(file)); }

/* -- late visibility and slow disks ------------------------------------------------------------------------------------------------ */

static int is_late(const char *path) {
    static time_t first;
    const char *part = getenv("LATE_PATH"), *rank = getenv("RANK"), *late = getenv("LATE_RANK"), *seconds = getenv("LATE_SECONDS");
    if (!part || !rank || !late || !seconds || strcmp(rank, late) || !strstr(path, part)) return 0;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    if (!first) first = now.tv_sec;
    if (now.tv_sec - first >= atoi(seconds)) return 0;
    errno = ENOENT;
    return 1;
}

static void delay(int file) {
    const char *part = getenv("SLOW_PATH"), *milliseconds = getenv("SLOW_MILLISECONDS");
    if (part && milliseconds && strstr(path_of(file), part)) usleep(1000 * atoi(milliseconds));
}

#define OPEN(name)                                                                                                                         \
    int name(const char *path, int flags, ...) {                                                                                           \
        REAL(name);                                                                                                                        \
        va_list more;                                                                                                                      \
        va_start(more, flags);                                                                                                             \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, mode_t) : 0;                                                            \
        va_end(more);                                                                                                                      \
        if (is_late(path)) return -1;                                                                                                      \
        return is_stale(flags & O_CREAT ? "create" : "open", path) ? -1 : real(path, flags, mode);                                         \
    }
OPEN(open)
OPEN(open64)

ssize_t read(int file, void *data, size_t size) {
    REAL(read);
    return is_stale_file("read", file) ? -1 : real(file, data, size);
}

ssize_t write(int file, const void *data, size_t size) {
    REAL(write);
    return is_stale_file("write", file) ? -1 : real(file, data, size);
}

int fsync(int file) {
    REAL(fsync);
    delay(file);
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
