/* Delays gloo's threads at each mutex, as a busy machine may. LD_PRELOAD; delay_gloo() sets the delay. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <string.h>
#include <unistd.h>

static volatile int milliseconds = 0;

void delay_gloo(int value) { milliseconds = value; }

int pthread_mutex_lock(pthread_mutex_t *mutex) {
    static int (*next)(pthread_mutex_t *) = 0;
    if (!next) next = (int (*)(pthread_mutex_t *))dlsym(RTLD_NEXT, "pthread_mutex_lock");
    if (milliseconds) {
        char name[16] = "";
        pthread_getname_np(pthread_self(), name, sizeof name);
        if (!strcmp(name, "pt_gloo_runloop")) usleep(1000 * milliseconds);
    }
    return next(mutex);
}
