//! Barriers, while other threads write back, sync and commit.

use std::sync::{Arc, OnceLock};

use riopipe_fs_core::Ino;
use riopipe_fs_core::fs::{Fs, JournalMode, MountOptions, SetAttr};

use crate::enumerate::NOW;
use crate::enumerate::tree::Tree;
use crate::enumerate::world::{World, options};
use crate::explore::{Run, below, explore, explore_with, file, later, node, root, world};

/// Files `p` and `r` are on one stream, `q` is on another one.
fn three_files() -> &'static Arc<World> {
    static WORLD: OnceLock<Arc<World>> = OnceLock::new();
    WORLD.get_or_init(|| {
        world(|fs: &Fs| {
            for name in [b"p", b"q", b"r"] {
                let made = fs.create(&root(), Ino::ROOT, name, &file(), NOW).unwrap().ino;
                fs.write(&root(), made, 0, &[1; 4096], NOW).unwrap();
            }
        })
    })
}

/// A change that a crash must not show without what was before a barrier.
fn change_after(run: &Run, ino: Ino, kind: u64) {
    let fs = &run.fs;
    match kind {
        0 => drop(fs.write(&root(), ino, 0, &[2; 4096], NOW).unwrap()),
        1 => {
            let mode = SetAttr { mode: Some(0o600), ..SetAttr::default() };
            fs.set_attr(&root(), ino, &mode, NOW).unwrap();
        }
        _ => drop(fs.create(&root(), Ino::ROOT, b"new", &file(), NOW).unwrap()),
    }
}

/// Whether that change of `path` is there.
fn is_after(run: &Run, tree: &Tree, path: &str) -> bool {
    run.byte(tree, path, 0) == 2
        || node(tree, path).is_some_and(|file| file.mode & 0o777 == 0o600)
        || node(tree, "new").is_some()
}

/// One of the calls that make changes durable.
fn push(run: &Run, ino: Ino) {
    match below(3) {
        0 => run.fs.fsync(ino, false, NOW).unwrap(),
        1 => run.fs.sync(NOW).unwrap(),
        _ => drop(run.fs.tick(later(10)).unwrap()),
    }
}

fn barrier_and_later_change(run: Run) {
    let fs = &run.fs;
    let (p, q) = (run.find("p"), run.find("q"));
    let kind = below(3);
    // So it is written back in any case.
    fs.write(&root(), q, 4096, &[1; 10], NOW).unwrap();
    let write = || {
        fs.write(&root(), p, 0, &[2; 4096], NOW).unwrap();
        fs.barrier(p, below(2) == 0, NOW).unwrap();
        change_after(&run, q, kind);
    };
    run.threads(&[&write, &|| push(&run, q)]);
    run.judge_cuts(&|tree| {
        if is_after(&run, tree, "q") {
            assert_eq!(run.byte(tree, "p", 0), 2, "a change after the barrier is there");
        }
    });
    run.end();
}

#[test]
fn a_change_after_a_barrier_is_never_there_without_it() {
    explore("barrier_and_later_change", three_files(), 40, barrier_and_later_change);
}

/// The second barrier is held.
fn held_barrier_and_later_change(run: Run) {
    let fs = &run.fs;
    let [p, q, r] = ["p", "q", "r"].map(|name| run.find(name));
    let kind = below(3);
    let write = || {
        for ino in [p, q] {
            fs.write(&root(), ino, 0, &[2; 4096], NOW).unwrap();
            fs.barrier(ino, false, NOW).unwrap();
        }
        change_after(&run, r, kind);
    };
    run.threads(&[&write, &|| push(&run, r)]);
    run.judge_cuts(&|tree| {
        let (first, second) = (run.byte(tree, "p", 0), run.byte(tree, "q", 0));
        assert!(first >= second, "the second is there, the first is not");
        if is_after(&run, tree, "r") {
            assert_eq!(second, 2, "a change after the second barrier is there");
        }
    });
    run.end();
}

#[test]
fn a_change_after_a_held_barrier_is_never_there_without_it() {
    explore("held_barrier_and_later_change", three_files(), 40, held_barrier_and_later_change);
}

/// A file between the barriers needs a main commit: it was renamed before its barrier, or it is
/// renamed while it is held.
fn barrier_that_needs_a_commit(run: Run) {
    let fs = &run.fs;
    let [p, q, r] = ["p", "q", "r"].map(|name| run.find(name));
    let is_late = below(2) == 0;
    let rename = || fs.rename(&root(), Ino::ROOT, b"q", Ino::ROOT, b"q2", 0, NOW).unwrap();
    let write = || {
        let order = |ino| {
            fs.write(&root(), ino, 0, &[2; 4096], NOW).unwrap();
            fs.barrier(ino, false, NOW).unwrap();
        };
        order(p);
        if !is_late {
            rename();
        }
        order(q);
        if is_late {
            rename();
        }
        order(r);
        fs.create(&root(), Ino::ROOT, b"new", &file(), NOW).unwrap();
    };
    run.threads(&[&write, &|| push(&run, r)]);
    run.judge_cuts(&|tree| {
        let q = if node(tree, "q").is_some() { "q" } else { "q2" };
        let [first, second, third] = ["p", q, "r"].map(|path| run.byte(tree, path, 0));
        assert!(first >= second && second >= third, "{first}, {second}, {third}");
        assert!(node(tree, "new").is_none() || third == 2, "the name came after all");
    });
    run.end();
}

#[test]
fn a_barrier_that_needs_a_commit_keeps_the_order() {
    explore("barrier_that_needs_a_commit", three_files(), 10, barrier_that_needs_a_commit);
}

/// Barriers of several threads, an unlink of a held file, and syncs: all end.
fn barriers_of_many(run: Run) {
    let fs = &run.fs;
    let [p, q, r] = ["p", "q", "r"].map(|name| run.find(name));
    let write = |ino, count: u8| {
        for round in 0..count {
            fs.write(&root(), ino, 0, &[2 + round; 4096], NOW).unwrap();
            fs.barrier(ino, false, NOW).unwrap();
        }
        if below(2) == 0 {
            fs.fsync(ino, false, NOW).unwrap();
        } else {
            fs.sync(NOW).unwrap();
        }
        run.crash(&|tree| {
            let path = if ino == p { "p" } else { "r" };
            assert_eq!(run.byte(tree, path, 0), 1 + count);
        });
    };
    let unlink = || {
        fs.write(&root(), q, 0, &[2; 4096], NOW).unwrap();
        fs.barrier(q, false, NOW).unwrap();
        fs.unlink(&root(), Ino::ROOT, b"q", NOW).unwrap();
        fs.forget(q, 1);
    };
    run.threads(&[&|| write(p, 2), &|| write(r, 2), &unlink, &|| push(&run, p)]);
    run.end();
}

#[test]
fn barriers_of_many_threads_end() {
    explore("barriers_of_many", three_files(), 10, barriers_of_many);
}

/// In mode `barrier` all files are on one stream, and commits are in flight.
#[test]
fn mode_barrier_keeps_the_order_of_all_threads() {
    let mount = || MountOptions { mode: JournalMode::Barrier, ..options(1) };
    let files = three_files();
    explore_with("mode barrier: later change", files, mount(), 12, barrier_and_later_change);
    explore_with("mode barrier: two", files, mount(), 12, held_barrier_and_later_change);
    explore_with("mode barrier: many", files, mount(), 8, barriers_of_many);
}
