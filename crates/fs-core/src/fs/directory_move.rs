//! `rename`, with all its flags.

use alloc::collections::BTreeSet;
use alloc::sync::Arc;
use alloc::vec::Vec;

use super::Fs;
use super::namespace::{
    LINKS_MAX, NewInode, add_subdirectory, check_dir, remove_subdirectory, touch,
};
use crate::block::Ino;
use crate::dir::{self, FileKind};
use crate::error::FsError;
use crate::format::inode::{DiskInode, Time, file_type};
use crate::fs::Caller;
use crate::groups::Claim;
use crate::inode_table::{Inode, InodeState};
use crate::open_inode::OpenInode;
use crate::sync::WriteGuard;
use crate::sync::atomic::Ordering;

/// `RENAME_NOREPLACE`: the new name must not exist.
pub const RENAME_NOREPLACE: u32 = 1;
/// `RENAME_EXCHANGE`: both names must exist, and are exchanged.
pub const RENAME_EXCHANGE: u32 = 2;
/// `RENAME_WHITEOUT`: a whiteout takes the old name.
pub const RENAME_WHITEOUT: u32 = 4;

/// A name in a directory.
#[derive(Clone, Copy, Debug)]
struct Place<'a> {
    parent: &'a Arc<Inode>,
    name: &'a [u8],
}

/// The locked inodes of a rename, and the fields that they will have.
struct Locked<'i> {
    inodes: Vec<(&'i Arc<Inode>, WriteGuard<'i, InodeState>, DiskInode)>,
}

impl Locked<'_> {
    fn disk(&mut self, ino: Ino) -> &mut DiskInode {
        let found = self.inodes.iter_mut().find(|(inode, ..)| inode.ino == ino);
        &mut found.expect("all inodes of the rename are locked").2
    }
}

impl Fs {
    /// Renames `name` in `parent` to `new_name` in `new_parent`. What had the new name before is
    /// replaced. `flags` are those of `renameat2`.
    ///
    /// # Errors
    /// As `renameat2`.
    #[allow(clippy::too_many_arguments)]
    pub fn rename(
        &self,
        caller: &Caller,
        parent: Ino,
        name: &[u8],
        new_parent: Ino,
        new_name: &[u8],
        flags: u32,
        now: Time,
    ) -> Result<(), FsError> {
        let known = RENAME_NOREPLACE | RENAME_EXCHANGE | RENAME_WHITEOUT;
        if flags & !known != 0 || flags & RENAME_EXCHANGE != 0 && flags != RENAME_EXCHANGE {
            return Err(FsError::Invalid);
        }
        if [name, new_name].iter().any(|name| matches!(*name, b"." | b"..")) {
            return Err(FsError::Busy);
        }
        self.submit_held()?;
        let parent = self.inode(parent)?;
        let new_parent = self.inode(new_parent)?;
        check_dir(&parent.state.read().disk)?;
        check_dir(&new_parent.state.read().disk)?;
        let old = Place { parent: &parent, name };
        let new = Place { parent: &new_parent, name: new_name };
        let _moves = (parent.ino != new_parent.ino).then(|| self.directory_moves.lock());
        loop {
            let found = self.find(parent.ino, name)?;
            let source = found.entry.ok_or(FsError::NotFound)?;
            let found_target = self.find(new_parent.ino, new_name)?;
            let target = found_target.entry;
            match &target {
                Some(_) if flags & RENAME_NOREPLACE != 0 => return Err(FsError::Exists),
                None if flags & RENAME_EXCHANGE != 0 => return Err(FsError::NotFound),
                // Two names of one file: nothing is done.
                Some(target) if target.ino == source.ino => return Ok(()),
                _ => {}
            }
            let source = match self.inode(source.ino) {
                Err(FsError::Stale(_)) => {
                    self.check_changed(parent.ino, found)?;
                    continue;
                }
                other => other?,
            };
            let target = match target.map(|entry| self.inode(entry.ino)).transpose() {
                Err(FsError::Stale(_)) => {
                    self.check_changed(new_parent.ino, found_target)?;
                    continue;
                }
                other => other?,
            };
            if parent.ino != new_parent.ino {
                self.check_no_loop(&source, &new_parent)?;
                if flags & RENAME_EXCHANGE != 0
                    && let Some(target) = &target
                {
                    self.check_no_loop(target, &parent)?;
                } else if let Some(target) = &target
                    && self.is_within(&parent, target.ino)?
                {
                    return Err(FsError::NotEmpty);
                }
            }
            let done = self.retry(|| {
                self.rename_once(caller, old, new, &source, target.as_ref(), flags, now)
            })?;
            if done {
                if let Some(target) = target
                    && !target.is_referenced()
                {
                    self.on_unreferenced(target);
                }
                return Ok(());
            }
        }
    }

    /// # Errors
    /// [`FsError::Invalid`]: a directory would move into itself.
    fn check_no_loop(&self, moved: &Inode, into: &Arc<Inode>) -> Result<(), FsError> {
        if self.is_within(into, moved.ino)? { Err(FsError::Invalid) } else { Ok(()) }
    }

    /// Whether a directory is `above` or lies below it.
    fn is_within(&self, dir: &Arc<Inode>, above: Ino) -> Result<bool, FsError> {
        let mut at = Arc::clone(dir);
        // A damaged tree may have a circle.
        let mut seen = BTreeSet::new();
        while seen.insert(at.ino) {
            if at.ino == above {
                return Ok(true);
            }
            if at.ino == Ino::ROOT {
                return Ok(false);
            }
            let state = at.state.read();
            if !state.disk.is_dir() || state.disk.links == 0 {
                return Ok(false);
            }
            let parent = dir::parent(at.ino, &state.disk, &self.view())?;
            drop(state);
            at = self.inode(parent)?;
        }
        Err(FsError::DamagedInode { what: "path (a circle)", ino: dir.ino })
    }

    /// Whether the rename was done; else one of the names belongs to another inode by now.
    #[allow(clippy::too_many_arguments)]
    fn rename_once(
        &self,
        caller: &Caller,
        old: Place<'_>,
        new: Place<'_>,
        source: &Arc<Inode>,
        target: Option<&Arc<Inode>>,
        flags: u32,
        now: Time,
    ) -> Result<bool, FsError> {
        let mut op = self.begin()?;
        op.set_claim(Claim::WriteBack);
        let mut order: Vec<&Arc<Inode>> = Vec::with_capacity(4);
        order.extend([old.parent, new.parent, source]);
        order.extend(target);
        order.sort_unstable_by_key(|inode| inode.ino);
        order.dedup_by_key(|inode| inode.ino);
        let mut locked = Locked { inodes: Vec::with_capacity(4) };
        for inode in order {
            let state = match op.lock(inode) {
                Err(FsError::Stale(_))
                    if inode.ino != old.parent.ino && inode.ino != new.parent.ino =>
                {
                    return Ok(false);
                }
                other => other?,
            };
            let disk = state.disk.clone();
            locked.inodes.push((inode, state, disk));
        }
        let (from, to) = (old.parent.ino, new.parent.ino);
        check_dir(locked.disk(from))?;
        check_dir(locked.disk(to))?;
        let found = dir::lookup(from, locked.disk(from), &op, old.name)?;
        let found_target = dir::lookup(to, locked.disk(to), &op, new.name)?;
        if found.is_none_or(|entry| entry.ino != source.ino)
            || found_target.map(|entry| entry.ino) != target.map(|target| target.ino)
        {
            return Ok(false);
        }
        locked.disk(from).check_replaceable()?;
        locked.disk(source.ino).check_replaceable()?;
        locked.disk(to).check_mutable()?;
        if let Some(target) = target {
            locked.disk(to).check_replaceable()?;
            locked.disk(target.ino).check_replaceable()?;
        }
        // A rename within one directory may race with a move of its own parent only by name, so the
        // kinds are enough to check.
        let is_dir = locked.disk(source.ino).is_dir();
        let exchange = flags & RENAME_EXCHANGE != 0;

        if let Some(target) = target.filter(|_| !exchange) {
            let replaced = locked.disk(target.ino).clone();
            match (is_dir, replaced.is_dir()) {
                (true, false) => return Err(FsError::NotDirectory),
                (false, true) => return Err(FsError::IsDirectory),
                (true, true) if !dir::is_empty(target.ino, &replaced, &op)? => {
                    return Err(FsError::NotEmpty);
                }
                _ => {}
            }
        }

        let source_kind = FileKind::of_mode(locked.disk(source.ino).mode);
        let target_kind = target.map(|target| FileKind::of_mode(locked.disk(target.ino).mode));
        // The new name first: it needs space.
        {
            let mut open = OpenInode { ino: to, disk: locked.disk(to) };
            match target {
                Some(_) => {
                    dir::replace(&mut open, &mut op, new.name, source.ino, source_kind)?;
                }
                None => dir::insert(&mut open, &mut op, new.name, source.ino, source_kind)?,
            }
        }
        let mut whiteout = None;
        {
            let allocated = if flags & RENAME_WHITEOUT != 0 {
                let mode = file_type::CHARACTER;
                let fields = NewInode { mode, rdev: 0, target: b"" };
                let ino = op.allocate_inode(from, false)?;
                let disk = self.new_inode(caller, locked.disk(from), &fields, now);
                whiteout = Some(Arc::new(self.inodes.make(ino, disk)));
                Some(ino)
            } else {
                None
            };
            let mut open = OpenInode { ino: from, disk: locked.disk(from) };
            match (target, target_kind, allocated) {
                (Some(target), Some(kind), _) if exchange => {
                    dir::replace(&mut open, &mut op, old.name, target.ino, kind)?;
                }
                (_, _, Some(ino)) => {
                    let kind = FileKind::CHARACTER;
                    dir::replace(&mut open, &mut op, old.name, ino, kind)?;
                }
                _ => {
                    dir::remove(&mut open, &mut op, old.name)?;
                }
            }
        }

        // `..` and the counts of subdirectories.
        if is_dir && from != to {
            let mut open = OpenInode { ino: source.ino, disk: locked.disk(source.ino) };
            dir::replace(&mut open, &mut op, b"..", to, FileKind::DIRECTORY)?;
            remove_subdirectory(locked.disk(from));
            add_subdirectory(self, locked.disk(to))?;
        }
        if let Some(target) = target {
            if exchange {
                if locked.disk(target.ino).is_dir() && from != to {
                    let mut open = OpenInode { ino: target.ino, disk: locked.disk(target.ino) };
                    dir::replace(&mut open, &mut op, b"..", from, FileKind::DIRECTORY)?;
                    remove_subdirectory(locked.disk(to));
                    add_subdirectory(self, locked.disk(from))?;
                }
            } else {
                let replaced = locked.disk(target.ino);
                if replaced.is_dir() {
                    replaced.links = 0;
                    replaced.size = 0;
                    remove_subdirectory(locked.disk(to));
                } else {
                    replaced.links = replaced.links.saturating_sub(1);
                }
            }
            locked.disk(target.ino).ctime = now;
            locked.disk(target.ino).version += 1;
        }
        debug_assert!(locked.disk(to).links <= LINKS_MAX || is_dir);
        touch(locked.disk(from), now);
        touch(locked.disk(to), now);
        locked.disk(source.ino).ctime = now;
        locked.disk(source.ino).version += 1;

        let mut changed: Vec<&Arc<Inode>> =
            locked.inodes.iter().map(|(inode, ..)| *inode).collect();
        changed.extend(&whiteout);
        let finished = op.finish(&changed)?;
        let tid = finished.tid;
        if let Some(target) = target
            && locked.disk(target.ino).links == 0
        {
            self.orphans.lock().add(target.ino, &mut self.running.lock());
        }
        self.make_unfit(source, old.parent, old.name, tid);
        self.make_unfit(target.unwrap_or(source), new.parent, new.name, tid);
        if is_dir || exchange {
            self.directory_moved.fetch_max(tid.0, Ordering::AcqRel);
        }
        for (_, state, disk) in &mut locked.inodes {
            state.written_size = state.written_size.min(disk.size);
            core::mem::swap(&mut state.disk, disk);
        }
        if let Some(whiteout) = whiteout {
            self.inodes.insert_new(whiteout);
        }
        drop(finished);
        Ok(true)
    }
}
