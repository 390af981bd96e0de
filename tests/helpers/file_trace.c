/* Records every change that a process makes under a folder, for crash_states.py. Load it with LD_PRELOAD.

   FILE_TRACE       the file to which records are appended; several processes may share it
   FILE_TRACE_ROOT  the folder, without links in its path

   A record is written after its call has returned, so a call that depends on another has its record later. Another process may see a new
   name before its record is written, so calls that change names hold a lock until then. The record of an fsync has the length of the trace
   when the fsync began: the fsync covers exactly the records before that position. The trace is opened for each record, so that a process
   may close all of its files.

   LD_PRELOAD sees calls of libc only. safetensors renames its files by a system call of its own, so the records of an open file have its
   path: crash_states.py infers the rename from the next one. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

struct header {
    uint32_t kind, first, second, data; /* a letter; lengths of two texts and of the data that follow */
    uint64_t inode;
    int64_t value; /* offset, size, flags or position */
};

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define CALL(kind, name, ...)                                                                                                              \
    static __typeof__(&name) real;                                                                                                         \
    if (!real) real = REAL(name);                                                                                                          \
    kind result = real(__VA_ARGS__);                                                                                                       \
    int saved = errno
#define RETURN                                                                                                                             \
    errno = saved;                                                                                                                         \
    return result

static int is_traced(const char *path) {
    const char *root = getenv("FILE_TRACE_ROOT");
    if (!root || !getenv("FILE_TRACE")) return 0;
    size_t length = strlen(root);
    return strncmp(path, root, length) == 0 && (path[length] == '/' || path[length] == 0);
}

static int open_trace(void) {
    static int (*real)(const char *, int, ...);
    if (!real) real = (int (*)(const char *, int, ...))dlsym(RTLD_NEXT, "open64");
    return real(getenv("FILE_TRACE"), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644);
}

static void record(char kind, uint64_t inode, int64_t value, const char *first, const char *second, const void *data, size_t size) {
    static ssize_t (*real)(int, const struct iovec *, int);
    if (!real) real = (ssize_t(*)(int, const struct iovec *, int))dlsym(RTLD_NEXT, "writev");
    struct header header = {(uint32_t)kind, (uint32_t)strlen(first), (uint32_t)strlen(second), (uint32_t)size, inode, value};
    struct iovec parts[] = {
        {&header, sizeof header}, {(void *)first, header.first}, {(void *)second, header.second}, {(void *)data, size}};
    ssize_t whole = sizeof header + header.first + header.second + size;
    int trace = open_trace();
    if (trace < 0 || real(trace, parts, 4) != whole) {
        fprintf(stderr, "file_trace: cannot write to %s\n", getenv("FILE_TRACE"));
        abort();
    }
    close(trace);
}

/* The path of an open file. Returns 1 if it is traced. */
static int path_of(int file, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, PATH_MAX - 1);
    path[length < 0 ? 0 : length] = 0;
    return length > 0 && is_traced(path);
}

/* The absolute path of a name in an open folder. Returns 1 if it is traced. */
static int path_at(int folder, const char *name, char *path) {
    char base[PATH_MAX] = "";
    if (name[0] == '/')
        base[0] = 0;
    else if (folder == AT_FDCWD) {
        if (!getcwd(base, sizeof base)) return 0;
    } else
        path_of(folder, base);
    int length = snprintf(path, PATH_MAX, "%s%s%s", base, base[0] ? "/" : "", name);
    return length < PATH_MAX && is_traced(path);
}

/* Wait for the calls of other processes that change names. Returns the lock to unlock, -1 without one: the name is not traced. */
static int lock(int folder, const char *name) {
    char path[PATH_MAX];
    if (!path_at(folder, name, path)) return -1;
    int trace = open_trace();
    while (trace >= 0 && flock(trace, LOCK_EX) && errno == EINTR);
    return trace;
}

#define LOCKED(kind, folder, path, name, ...)                                                                                              \
    int locked = lock(folder, path);                                                                                                       \
    CALL(kind, name, __VA_ARGS__)
#define UNLOCK                                                                                                                             \
    if (locked >= 0) {                                                                                                                     \
        flock(locked, LOCK_UN); /* a process that was forked meanwhile has the file open, too */                                           \
        close(locked);                                                                                                                     \
    }                                                                                                                                      \
    RETURN

static uint64_t inode_of(int file) {
    struct stat facts;
    return fstat(file, &facts) ? 0 : facts.st_ino;
}

static int changes_names(int flags) {
    return flags & (O_CREAT | O_TRUNC) && (flags & O_TMPFILE) != O_TMPFILE;
}

static void opened(int file, int flags) {
    char path[PATH_MAX];
    if (file >= 0 && changes_names(flags) && path_of(file, path))
        record('O', inode_of(file), flags & O_TRUNC, path, "", "", 0);
}

#define MODE                                                                                                                               \
    mode_t mode = 0;                                                                                                                       \
    if (flags & O_CREAT || (flags & O_TMPFILE) == O_TMPFILE) {                                                                             \
        va_list more;                                                                                                                      \
        va_start(more, flags);                                                                                                             \
        mode = va_arg(more, mode_t);                                                                                                       \
        va_end(more);                                                                                                                      \
    }
#define OPEN(name)                                                                                                                         \
    int name(const char *path, int flags, ...) {                                                                                           \
        MODE;                                                                                                                              \
        int locked = changes_names(flags) ? lock(AT_FDCWD, path) : -1;                                                                     \
        CALL(int, name, path, flags, mode);                                                                                                \
        opened(result, flags);                                                                                                             \
        UNLOCK;                                                                                                                            \
    }
#define OPENAT(name)                                                                                                                       \
    int name(int folder, const char *path, int flags, ...) {                                                                               \
        MODE;                                                                                                                              \
        int locked = changes_names(flags) ? lock(folder, path) : -1;                                                                       \
        CALL(int, name, folder, path, flags, mode);                                                                                        \
        opened(result, flags);                                                                                                             \
        UNLOCK;                                                                                                                            \
    }
OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)

/* -- data ------------------------------------------------------------------------------------------------------------------------ */

static void written(int file, const void *data, ssize_t size, int64_t offset) {
    char path[PATH_MAX];
    if (size <= 0 || !path_of(file, path)) return;
    if (offset < 0) offset = lseek(file, 0, SEEK_CUR) - size;
    record('W', inode_of(file), offset, path, "", data, size);
}

static void written_parts(int file, const struct iovec *parts, ssize_t size, int64_t offset) {
    char path[PATH_MAX];
    if (size <= 0 || !path_of(file, path)) return;
    if (offset < 0) offset = lseek(file, 0, SEEK_CUR) - size;
    for (; size > 0; parts++) {
        ssize_t part = (ssize_t)parts->iov_len < size ? (ssize_t)parts->iov_len : size;
        if (part) record('W', inode_of(file), offset, path, "", parts->iov_base, part);
        offset += part;
        size -= part;
    }
}

ssize_t write(int file, const void *data, size_t size) {
    CALL(ssize_t, write, file, data, size);
    written(file, data, result, -1);
    RETURN;
}

#define PWRITE(name)                                                                                                                       \
    ssize_t name(int file, const void *data, size_t size, off64_t offset) {                                                                \
        CALL(ssize_t, name, file, data, size, offset);                                                                                     \
        written(file, data, result, offset);                                                                                               \
        RETURN;                                                                                                                            \
    }
PWRITE(pwrite)
PWRITE(pwrite64)

ssize_t writev(int file, const struct iovec *parts, int count) {
    CALL(ssize_t, writev, file, parts, count);
    written_parts(file, parts, result, -1);
    RETURN;
}

#define PWRITEV(name)                                                                                                                      \
    ssize_t name(int file, const struct iovec *parts, int count, off64_t offset) {                                                         \
        CALL(ssize_t, name, file, parts, count, offset);                                                                                   \
        written_parts(file, parts, result, offset);                                                                                        \
        RETURN;                                                                                                                            \
    }
PWRITEV(pwritev)
PWRITEV(pwritev64)

#define FTRUNCATE(name)                                                                                                                    \
    int name(int file, off64_t size) {                                                                                                     \
        CALL(int, name, file, size);                                                                                                       \
        char path[PATH_MAX];                                                                                                               \
        if (result == 0 && path_of(file, path)) record('T', inode_of(file), size, path, "", "", 0);                                          \
        RETURN;                                                                                                                            \
    }
FTRUNCATE(ftruncate)
FTRUNCATE(ftruncate64)

/* A write through a shared mapping leaves no call to record: crash_states.py refuses a trace that has one. */
#define MMAP(name)                                                                                                                         \
    void *name(void *address, size_t size, int protection, int flags, int file, off64_t offset) {                                          \
        CALL(void *, name, address, size, protection, flags, file, offset);                                                                \
        char path[PATH_MAX];                                                                                                               \
        if (file >= 0 && protection & PROT_WRITE && flags & MAP_SHARED && path_of(file, path)) record('P', 0, 0, path, "", "", 0);         \
        RETURN;                                                                                                                            \
    }
MMAP(mmap)
MMAP(mmap64)

/* -- names ----------------------------------------------------------------------------------------------------------------------- */

static void renamed(char kind, int from, const char *old, int to, const char *new) {
    char first[PATH_MAX], second[PATH_MAX];
    int traced = path_at(from, old, first);
    if (path_at(to, new, second) || traced) record(kind, 0, 0, first, second, "", 0);
}

int rename(const char *old, const char *new) {
    LOCKED(int, AT_FDCWD, new, rename, old, new);
    if (result == 0) renamed('R', AT_FDCWD, old, AT_FDCWD, new);
    UNLOCK;
}

int renameat(int from, const char *old, int to, const char *new) {
    LOCKED(int, to, new, renameat, from, old, to, new);
    if (result == 0) renamed('R', from, old, to, new);
    UNLOCK;
}

int link(const char *old, const char *new) {
    LOCKED(int, AT_FDCWD, new, link, old, new);
    if (result == 0) renamed('L', AT_FDCWD, old, AT_FDCWD, new);
    UNLOCK;
}

int linkat(int from, const char *old, int to, const char *new, int flags) {
    LOCKED(int, to, new, linkat, from, old, to, new, flags);
    if (result == 0) renamed('L', from, old, to, new);
    UNLOCK;
}

static void removed(int folder, const char *name) {
    char path[PATH_MAX];
    if (path_at(folder, name, path)) record('U', 0, 0, path, "", "", 0);
}

int unlink(const char *name) {
    LOCKED(int, AT_FDCWD, name, unlink, name);
    if (result == 0) removed(AT_FDCWD, name);
    UNLOCK;
}

int rmdir(const char *name) {
    LOCKED(int, AT_FDCWD, name, rmdir, name);
    if (result == 0) removed(AT_FDCWD, name);
    UNLOCK;
}

int unlinkat(int folder, const char *name, int flags) {
    LOCKED(int, folder, name, unlinkat, folder, name, flags);
    if (result == 0) removed(folder, name);
    UNLOCK;
}

static void made(int folder, const char *name) {
    char path[PATH_MAX];
    struct stat facts;
    if (path_at(folder, name, path) && stat(path, &facts) == 0) record('M', facts.st_ino, 0, path, "", "", 0);
}

int mkdir(const char *name, mode_t mode) {
    LOCKED(int, AT_FDCWD, name, mkdir, name, mode);
    if (result == 0) made(AT_FDCWD, name);
    UNLOCK;
}

int mkdirat(int folder, const char *name, mode_t mode) {
    LOCKED(int, folder, name, mkdirat, folder, name, mode);
    if (result == 0) made(folder, name);
    UNLOCK;
}

/* -- durability ------------------------------------------------------------------------------------------------------------------ */

#define SYNC(name)                                                                                                                         \
    int name(int file) {                                                                                                                   \
        char path[PATH_MAX];                                                                                                               \
        struct stat facts = {0};                                                                                                           \
        int traced = path_of(file, path);                                                                                                  \
        if (traced) stat(getenv("FILE_TRACE"), &facts);                                                                                    \
        CALL(int, name, file);                                                                                                             \
        if (result == 0 && traced) record('S', inode_of(file), facts.st_size, path, "", "", 0);                                              \
        RETURN;                                                                                                                            \
    }
SYNC(fsync)
SYNC(fdatasync)

/* Records that the program has reported something, such as a finished save. */
void file_trace_mark(const char *text) {
    if (getenv("FILE_TRACE")) record('K', 0, 0, text, "", "", 0);
}
