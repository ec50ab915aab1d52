#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    riopipe_fuzz::fs::image(data);
});
