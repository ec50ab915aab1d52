// The interface from C++: objects with owners, and an exception for each error. Usage: cplusplus VOLUME MEMBER...
#include <cstdint>
#include <cstring>
#include <iostream>
#include <memory>
#include <stdexcept>
#include <vector>

#include "riopipe.h"

namespace {

template <auto Free> struct Freed {
    template <typename T> void operator()(T *object) const { Free(object); }
};
using Volume = std::unique_ptr<riop_volume, Freed<riop_volume_free>>;
using Stream = std::unique_ptr<riop_stream, Freed<riop_stream_free>>;
using Group = std::unique_ptr<riop_group, Freed<riop_group_free>>;
using Buf = std::unique_ptr<riop_buf, Freed<riop_buf_free>>;
using Error = std::unique_ptr<riop_error, Freed<riop_error_free>>;

struct Failure : std::runtime_error {
    int code;
    explicit Failure(const Error &error) : runtime_error(riop_error_text(error.get())), code(riop_error_code(error.get())) {}
};

// Calls a function of the library with the arguments and a place for the error.
template <typename Function, typename... Arguments> void call(Function function, Arguments... arguments) {
    riop_error *error = nullptr;
    if (function(arguments..., &error) != RIOP_OK)
        throw Failure(Error(error));
}

// As above, and returns the object that the function puts into its last place.
template <typename Owner, typename Function, typename... Arguments>
Owner make(Function function, Arguments... arguments) {
    typename Owner::pointer object = nullptr;
    call(function, arguments..., &object);
    return Owner(object);
}

std::uint64_t submit(const Stream &stream, std::uint64_t lba, const char *text, std::uint32_t flags) {
    auto group = make<Group>(riop_group_new);
    auto buf = make<Buf>(riop_buf_new, stream.get(), std::size_t{RIOP_BLOCK_BYTES});
    std::memset(riop_buf_data(buf.get()), 0, riop_buf_length(buf.get()));
    std::strcpy(static_cast<char *>(riop_buf_data(buf.get())), text);
    call(riop_group_write, group.get(), lba, buf.get(), std::uint32_t{RIOP_FRESH});
    buf.release(); // the group has it
    std::uint64_t seq = 0;
    call(riop_group_submit, group.get(), stream.get(), flags, std::int64_t{RIOP_FOREVER}, &seq);
    return seq;
}

void run(const char *name, const std::vector<const char *> &members) {
    riop_open_options options = {};
    options.size = sizeof options;
    riop_volume *opened = nullptr;
    call(riop_volume_open, name, members.data(), members.size(), &options, &opened, nullptr);
    Volume volume(opened);
    auto stream = make<Stream>(riop_stream_open, volume.get(), std::uint16_t{2}, nullptr);
    submit(stream, 500, "first", 0);
    auto seq = submit(stream, 501, "second", RIOP_DURABLE);
    riop_marks marks = {};
    call(riop_stream_wait, stream.get(), std::uint32_t{RIOP_UNTIL_DURABLE}, seq, std::int64_t{RIOP_FOREVER}, &marks);
    std::vector<char> blocks(2 * RIOP_BLOCK_BYTES);
    call(riop_stream_read, stream.get(), std::uint64_t{500}, static_cast<void *>(blocks.data()), blocks.size(),
         std::int64_t{RIOP_FOREVER});
    if (std::strcmp(&blocks[0], "first") != 0 || std::strcmp(&blocks[RIOP_BLOCK_BYTES], "second") != 0)
        throw std::runtime_error("other blocks were read");
    std::vector<char> later(RIOP_BLOCK_BYTES);
    call(riop_stream_submit_read, stream.get(), std::uint64_t{501}, static_cast<void *>(later.data()), later.size(),
         std::uint64_t{7}, std::int64_t{RIOP_FOREVER}, nullptr);
    call(riop_stream_wait, stream.get(), std::uint32_t{RIOP_UNTIL_READ}, std::uint64_t{0}, std::int64_t{RIOP_FOREVER},
         nullptr);
    std::vector<riop_read_end> ends(2);
    std::size_t count = 0;
    call(riop_stream_read_ends, stream.get(), ends.data(), ends.size(), &count);
    if (count != 1 || ends[0].tag != 7 || ends[0].code != RIOP_OK || std::strcmp(later.data(), "second") != 0)
        throw std::runtime_error("another block was read, or none");
    try {
        submit(stream, std::uint64_t{1} << 40, "outside", 0); // frees the group with its buffer
        throw std::runtime_error("a write outside of the volume was taken");
    } catch (const Failure &failure) {
        if (failure.code != RIOP_RANGE)
            throw;
    }
    call(riop_stream_close, stream.get(), std::int64_t{RIOP_FOREVER}, nullptr);
    stream.release();
    call(riop_volume_close, volume.get(), std::int64_t{RIOP_FOREVER});
    volume.release();
}

} // namespace

int main(int argc, char **argv) {
    try {
        if (argc < 3)
            throw std::runtime_error("usage: cplusplus VOLUME MEMBER...");
        run(argv[1], std::vector<const char *>(argv + 2, argv + argc));
        std::cout << "cplusplus: passed" << std::endl;
        return 0;
    } catch (const std::exception &error) {
        std::cerr << error.what() << std::endl;
        return 1;
    }
}
