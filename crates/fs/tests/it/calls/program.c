/* Makes all calls of riofs.h in the directory of its argument, and prints what they return. */
#define _GNU_SOURCE
#include "riofs.h"

#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

static void fail(const char *call)
{
	perror(call);
	exit(1);
}

int main(int argc, char **argv)
{
	if (argc != 2 || chdir(argv[1]) != 0)
		fail("chdir");
	int a = open("a", O_RDWR | O_CREAT | O_TRUNC, 0644);
	int b = open("b", O_WRONLY | O_CREAT | O_TRUNC, 0644);
	if (a < 0 || b < 0 || ftruncate(a, 8192) != 0)
		fail("open");
	char *pages = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_SHARED, a, 0);
	if (pages == MAP_FAILED)
		fail("mmap");
	memcpy(pages + 4090, "by mapping", 10);
	int first = riofs_fbarrier(a);
	if (write(b, "b", 1) != 1)
		fail("write");
	int second = riofs_fdatabarrier(b);
	int third = riofs_syncfs(b);
	int error = riofs_fbarrier(-1) == -1 ? errno : 0;
	printf("%d %d %d %s\n", first, second, third, error == EBADF ? "EBADF" : "?");
	return 0;
}
